"""Build libhdfs, Hadoop's C client, for tests, from the source that pydoop ships, because no package contains it.

The build needs gcc and a JDK (``jni.h``). ``pyarrow.fs.HadoopFileSystem`` loads libhdfs and a JVM into the process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.local_hdfs import CACHE, LocalHdfs

SOURCE = "pydoop-2.0.0"
SOURCE_SHA256 = "c7eb2ad8c36d2a75dc1c6cee701928334614f2e862a70798b0cb278e3102f77d"
LIBRARY = CACHE / "native" / "libhdfs.so"


def java_home() -> Path | None:
    """Return the folder of a JDK with headers, or None if there is none."""
    compiler = shutil.which("javac")
    homes = [os.environ.get("JAVA_HOME"), compiler and str(Path(compiler).resolve().parents[1])]
    return next((Path(home) for home in homes if home and Path(home, "include", "jni.h").exists()), None)


def environment(cluster: LocalHdfs, home: Path) -> dict[str, str]:
    """Return the environment variables of a process that uses libhdfs; build libhdfs first if it is missing."""
    if not LIBRARY.exists():
        _build(home)
    return {
        "JAVA_HOME": str(home),
        "ARROW_LIBHDFS_DIR": str(LIBRARY.parent),
        "CLASSPATH": cluster.classpath,
        # Use little memory, because the tests run at the same time.
        "LIBHDFS_OPTS": "-Xmx256m -XX:+UseSerialGC",
    }


def _build(home: Path) -> None:
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent) as scratch:
        source = _source(Path(scratch)) / "src" / "libhdfs"
        headers = [source, source / "include", source / "os" / "posix", home / "include", home / "include" / "linux"]
        files = [file for folder in (".", "common", "os/posix") for file in sorted((source / folder).glob("*.c"))]
        built = Path(scratch, LIBRARY.name)
        libraries = home / "lib" / "server"
        command = ["gcc", "-O2", "-shared", "-fPIC", "-w", "-o", str(built)]
        command += [f"-I{header}" for header in headers] + [str(file) for file in files]
        command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ljvm", "-lpthread"]
        subprocess.run(command, check=True)
        # Rename atomically, because another process may build at the same time.
        built.rename(LIBRARY)


def _source(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    # pip runs its setup to find its name, but compiles and installs nothing.
    pip += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(scratch), "pydoop==2.0.0"]
    subprocess.run(pip, check=True)
    archive = scratch / f"{SOURCE}.tar.gz"
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SOURCE_SHA256:
        raise SystemExit(f"{archive.name} has SHA-256 {found}; {SOURCE_SHA256} was expected")
    with tarfile.open(archive) as opened:
        opened.extractall(scratch, filter="data")
    return scratch / SOURCE
