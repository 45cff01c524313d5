"""Programs that only check files: built from their modules like the stack's, but needed by tests alone."""

from pathlib import Path

from verl_otel.stack import binaries

binaries.SOURCES["validators"] = (
    Path(__file__).parent / "validators-build",
    {"kustomize": "sigs.k8s.io/kustomize/kustomize/v5", "compose": "github.com/compose-spec/compose-go/v2/cmd"},
    1,
)


def validator(program: str) -> str:
    """The path of `kustomize` or `compose` (which says what `docker compose config` does)."""
    return str(binaries.binary(program))
