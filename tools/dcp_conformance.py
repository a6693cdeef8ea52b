"""Run PyTorch's own tests of torch.distributed.checkpoint with the storage writer and reader of asymcheck.

Usage: ``python -m tools.dcp_conformance PYTORCH [FILE...]``, where PYTORCH is a checkout of PyTorch of the installed
release, and FILE a file in ``test/distributed/checkpoint``. ``FileSystemWriter`` and ``FileSystemReader`` are replaced
in every process of a test. Tests that need GPUs run on the CPU if they allow it. docs/dcp.md has the results.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

# Other files test torch itself, file formats, or need CUDA.
_FILES = ("test_dtensor_resharding.py", "test_file_system_checkpoint_cpu.py", "e2e/test_e2e_save_and_load.py")
_LIMIT_S = 1800
_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._storage_utils",
    "torch.distributed.checkpoint.filesystem",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "asymcheck.integrations.dcp",
)
# Processes that only track resources of others need no torch.
_SITE = """import sys
if not any("resource_tracker" in word for word in sys.orig_argv):
    import tools.dcp_conformance
    tools.dcp_conformance.substitute()
"""
_TEST = re.compile(r"^(test_\w+) \(.*\.\.\. ?")
_RESULT = re.compile(r"(?:^|\.\.\. )(ok|FAIL|ERROR|skipped .*)$")


def substitute() -> None:
    """Replace the storage classes of DCP in this process, and what requires GPUs."""
    # Only the processes of tests need torch, and expecttest, which its helpers import.
    dcp, storage_utils, filesystem, common_distributed, common_dtensor, ours = map(importlib.import_module, _MODULES)

    class Folder:
        """Storage with the arguments of FileSystemWriter. Each save replaces the previous one, as in a folder."""

        step = ""

        def __init__(self, path: object, *_args: object, **_options: object) -> None:
            super().__init__(self._uri(path))  # type: ignore[call-arg]  # a class beside this one

        def _uri(self, path: object) -> str:
            return f"asymcheck://{os.path.abspath(str(path))}/store?run=tests{self.step}"

        def reset(self, checkpoint_id: object = None) -> None:
            given = checkpoint_id is None or str(checkpoint_id).startswith("asymcheck:")
            super().reset(checkpoint_id if given else self._uri(checkpoint_id))  # type: ignore[misc]  # as above

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
            return "://" not in str(checkpoint_id)

    class Writer(Folder, ours.AsymcheckWriter):  # type: ignore[misc, name-defined]  # imported above
        step = "/step-0"

    class Reader(Folder, ours.AsymcheckReader):  # type: ignore[misc, name-defined]  # imported above
        pass

    # Processes of async saves unpickle a writer by its name.
    for storage in (Writer, Reader):
        storage.__qualname__ = storage.__name__
        globals()[storage.__name__] = storage
    for module in (dcp, filesystem, storage_utils):
        vars(module).update(FileSystemWriter=Writer, FileSystemReader=Reader)

    def runs_anywhere(*_args: object, **_options: object) -> object:
        return lambda function: function

    for module in (common_distributed, common_dtensor):
        vars(module).update(skip_if_lt_x_gpu=runs_anywhere, requires_nccl=runs_anywhere)
    # Tests load parts of checkpoints on purpose.
    warnings.filterwarnings("ignore", category=UserWarning, message="step .* given state differ")


def run(checkout: Path, file_name: str) -> list[tuple[str, str]]:
    """Run a file of tests, print its output if a test fails, and return the tests with their results."""
    file = checkout / "test/distributed/checkpoint" / file_name
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SITE)
        paths = [folder, str(Path(__file__).resolve().parents[1]), *os.environ.get("PYTHONPATH", "").split(":")]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        log = Path(folder) / "log.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, str(file), "-v"],
                env=environment,
                cwd=folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                status: object = process.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = f"not finished after {_LIMIT_S} s"
        text = log.read_text(errors="replace")
    if "Error in sitecustomize" in text:
        sys.exit(f"the storage classes were not replaced (the tests need the package expecttest):\n{text}")
    results = []
    name = ""
    for line in text.splitlines():
        name = test[1] if (test := _TEST.match(line)) else name
        # The output of processes stands between a test and its result.
        if name and (result := _RESULT.search(line)):
            results.append((name, result[1]))
            name = ""
    if status:
        print(text[-20000:])
    if status not in (0, 1) or not results:
        results.append((file.stem, f"ended with {status}"))
    return results


def main() -> None:
    """Run the files, and print a table of results."""
    checkout = Path(sys.argv[1])
    names = sys.argv[2:] or [name for name in _FILES if (checkout / "test/distributed/checkpoint" / name).exists()]
    for name in names:
        results = run(checkout, name)
        passed = sum(result == "ok" for _, result in results)
        print(f"{name}: {passed} of {len(results)} passed", flush=True)
        for test, result in results:
            if result != "ok":
                print(f"    {test}: {result}", flush=True)


if __name__ == "__main__":
    main()
