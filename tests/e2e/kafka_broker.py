"""A real Kafka broker: Kafka's own jars from Maven Central, one node (KRaft)."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from verl_otel.stack.binaries import CACHE
from verl_otel.stack.ports import free_ports

VERSION = "4.1.1"

_POM = f"""
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>verl-otel</groupId><artifactId>kafka-broker</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>{VERSION}</version>
    </dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""

_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/kafka
num.partitions=3
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def jars() -> Path:
    """The folder of the jars, fetched by Maven if need be (43 MB)."""
    target = CACHE / f"kafka-{VERSION}"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            (Path(scratch) / "pom.xml").write_text(_POM)
            command = [
                "mvn",
                "-q",
                "-B",
                "dependency:copy-dependencies",
                "-DoutputDirectory=libs",
                "-DincludeScope=runtime",
            ]
            subprocess.run(command, cwd=scratch, check=True, timeout=900)
            shutil.move(Path(scratch) / "libs", target)
    return target


class Kafka:
    """A broker with its data in `folder`. Topics are made, with three partitions, when they are written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = free_ports(["broker", "controller"])
        self.address = f"127.0.0.1:{ports['broker']}"
        (folder / "server.properties").write_text(_PROPERTIES.format(folder=folder, **ports))
        identifier = self.tool("kafka.tools.StorageTool", "random-uuid").split()[-1]
        arguments = ["format", "--standalone", "-t", identifier, "-c", str(folder / "server.properties")]
        self.tool("kafka.tools.StorageTool", *arguments)

    def _java(self, main: str, *arguments: str) -> list[str]:
        return ["java", "-Xms64m", "-Xmx384m", "-XX:TieredStopAtLevel=1", "-cp", f"{jars()}/*", main, *arguments]

    def tool(self, main: str, *arguments: str, send: bytes = b"") -> str:
        """What one of Kafka's command-line programs prints."""
        command = self._java(main, *arguments)
        done = subprocess.run(command, input=send, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return done.stdout.decode()

    def start(self) -> None:
        log_path = self.folder / "broker.log"
        started = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("ab") as log:
            command = self._java("kafka.Kafka", str(self.folder / "server.properties"))
            environment = {k: v for k, v in os.environ.items() if not k.startswith("KAFKA_")}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while b"Kafka Server started" not in log_path.read_bytes()[started:]:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(log_path.read_text(errors="replace")[-3000:])
            time.sleep(0.2)

    def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        self.process.wait()
