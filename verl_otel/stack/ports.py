"""On which ports of loopback the stack listens, and who has them already."""

import socket
from collections.abc import Iterable
from pathlib import Path

USUAL = {
    "otlp_grpc": 4317,
    "otlp_http": 4318,
    "collector_health": 13133,
    "collector_self": 8888,
    "jaeger": 16686,
    "jaeger_grpc": 16685,
    "jaeger_otlp": 14317,
    "jaeger_health": 13134,
    "prometheus": 9090,
    "alertmanager": 9093,
    "relay": 4321,
    "mlflow": 5000,
    "bridge": 4320,
}
"""Name -> the port that its users expect."""


def free_ports(names: Iterable[str]) -> dict[str, int]:
    """A free port for each name."""
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ports = {name: s.getsockname()[1] for name, s in sockets.items()}
    for s in sockets.values():
        s.close()
    return ports


def taken(ports: dict[str, int]) -> dict[str, str]:
    """Name -> who listens there, of the ports that cannot be had."""
    return {name: _owner(port) for name, port in ports.items() if not _can_listen(port)}


def _can_listen(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _owner(port: int) -> str:
    """Program and pid that listen on a port, as far as we may know it."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = str(descriptor.readlink()) in sockets
            if found:
                process = descriptor.parents[1]
                return f"{(process / 'comm').read_text().strip()}, pid {process.name}"
        except OSError:  # has ended meanwhile, or is another user's
            continue
    return "a program of another user"


def _listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on a port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: listens
                inodes.add(fields[9])
    return inodes
