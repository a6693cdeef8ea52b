"""Test that every rule finds violations and accepts valid code."""

import pytest

from tests.architecture.rules import Rule
from tests.architecture.source_tree import SourceTree
from tests.architecture.test_layers import RULES

RULE = {rule.name: rule for rule in RULES}

Sources = dict[str, str]


BROKEN: dict[str, list[Sources]] = {
    "every_module_has_a_layer": [
        {"asymcheck/attic.py": ""},
        {"asymcheck/attic/box.py": ""},
    ],
    "arrows_point_down": [
        {"asymcheck/format/frame.py": "from asymcheck.storage.nvme import pack"},
        {"asymcheck/store.py": "import asymcheck.checkpointer"},
        {"asymcheck/storage/nvme/pack_writer.py": "def f():\n    from asymcheck.commit.synchronous_save import save"},
        {"asymcheck/restore/resolve.py": "if TYPE_CHECKING:\n    from asymcheck.store import Store"},
        {"asymcheck/codecs/zstd.py": "from ..store import Store"},
        {"asymcheck/codecs/__init__.py": "from ..store import Store"},
        {"asymcheck/errors.py": "import_module('asymcheck.cli.verify')"},
        {"asymcheck/errors.py": "importlib.import_module('asymcheck.cli')"},
        {"asymcheck/errors.py": "__import__('asymcheck.store')"},
        {"asymcheck/format/a.py": "from asymcheck import store", "asymcheck/store.py": ""},
    ],
    "siblings_do_not_import": [
        {"asymcheck/commit/transaction.py": "from asymcheck.restore.resolve import resolve"},
        {"asymcheck/distributed/deep.py": "from asymcheck.measurement import measure"},
        {"asymcheck/policies/batching.py": "from asymcheck.storage.nvme.pack_writer import Pack"},
        {"asymcheck/checkpointer.py": "from asymcheck.convert.convert import foreign_state"},
        {"asymcheck/codecs/delta.py": "import asymcheck.state.partition_plan"},
    ],
    "lowest_layer": [
        {"asymcheck/errors.py": "import numpy"},
        {"asymcheck/events.py": "from asymcheck.errors import Failure"},
        {"asymcheck/types.py": "from asymcheck.config import Config"},
    ],
    "no_import_of_the_public_interface": [
        {"asymcheck/cli/inspect.py": "from asymcheck import Store"},
        {"asymcheck/cli/inspect.py": "from asymcheck import errors", "asymcheck/errors.py": ""},
        {"asymcheck/store.py": "import asymcheck"},
        {"asymcheck/store.py": "from . import errors"},
    ],
    "format_is_pure": [
        *({"asymcheck/format/frame.py": f"import {module}"} for module in ("torch", "os", "io", "time", "threading")),
        *({"asymcheck/format/frame.py": f"import {module}"} for module in ("mmap", "pathlib", "socket", "subprocess")),
        {"asymcheck/format/frame.py": "from os.path import join"},
        {"asymcheck/format/frame.py": "def f():\n    import time"},
    ],
    "storage_and_policies_know_no_torch": [
        {"asymcheck/storage/nvme/pack_writer.py": "import torch"},
        {"asymcheck/policies/interval.py": "from torch import nn"},
        {"asymcheck/storage/shm_owner.py": "import torch.cuda"},
    ],
    "one_importer_each": [
        {"asymcheck/store.py": "import lmdb"},
        {"asymcheck/storage/nvme/pack_writer.py": "import lmdb"},
        {"asymcheck/format/frame.py": "from xxhash import xxh3_128"},
        {"asymcheck/restore/resolve.py": "import pyarrow.ipc as ipc"},
        {"asymcheck/codecs/planes.py": "def f():\n    import zstandard"},
        {"asymcheck/checkpointer.py": "import click"},
    ],
    "shipped_code_stands_alone": [
        {"asymcheck/store.py": "from tools.demo import main"},
        {"asymcheck/fsck/verify.py": "import format_spec.reference_reader"},
    ],
    "the_reference_reader_is_independent": [
        {"format_spec/reference_reader.py": "import asymcheck"},
        {"format_spec/v1/reader.py": "from asymcheck.format.frame import decode"},
    ],
    "no_cycles": [
        {
            "asymcheck/storage/a.py": "import asymcheck.storage.b",
            "asymcheck/storage/b.py": "import asymcheck.storage.a",
        },
        {
            "asymcheck/codecs/a.py": "from asymcheck.codecs import b",
            "asymcheck/codecs/b.py": "def f():\n    from asymcheck.codecs.c import C",
            "asymcheck/codecs/c.py": "if TYPE_CHECKING:\n    from asymcheck.codecs.a import A",
        },
        {
            "asymcheck/storage/__init__.py": "from asymcheck.storage.base import Tier",
            "asymcheck/storage/base.py": "from asymcheck.storage import Place",
        },
        {
            # A module outside of the cycle imports one of its modules.
            "asymcheck/cli/a.py": "import asymcheck.store",
            "asymcheck/store.py": "import asymcheck.fsck.verify",
            "asymcheck/fsck/verify.py": "import asymcheck.store",
        },
    ],
    "names_say_something": [
        {"asymcheck/utils.py": ""},
        {"asymcheck/storage/nvme/file_helpers.py": ""},
        {"asymcheck/common/__init__.py": ""},
        {"asymcheck/commit/flush_manager.py": ""},
        {"asymcheck/misc.py": ""},
    ],
    "errors_are_our_own": [
        {"asymcheck/store.py": "raise ValueError('no')"},
        {"asymcheck/store.py": "raise RuntimeError"},
        {"asymcheck/store.py": "raise KeyError('x') from error"},
        {"asymcheck/store.py": "raise Exception"},
        {"asymcheck/store.py": "def f():\n    raise AssertionError"},
        {"asymcheck/storage/base.py": "class A:\n    def read(self):\n        raise OSError(5, 'no')"},
        {"asymcheck/storage/base.py": "class A:\n    def read(self):\n        raise NotImplementedError"},
        {"asymcheck/types.py": "def __dir__():\n    raise AttributeError('x')"},
        {"asymcheck/types.py": "def each():\n    raise StopIteration"},
        {"asymcheck/store.py": "raise SystemExit(1)"},
        {"asymcheck/store.py": "import builtins\nraise builtins.ValueError('no')"},
        {"asymcheck/store.py": "import lmdb\nraise lmdb.MapFullError()"},
        {"asymcheck/store.py": "from zipfile import BadZipFile\nraise BadZipFile()"},
        {"asymcheck/store.py": "import click\nraise click.Abort"},
    ],
    "errors_have_one_home": [
        {"asymcheck/store.py": "class Busy(Exception): pass"},
        {"asymcheck/storage/base.py": "class Gone(OSError): pass"},
        {"asymcheck/storage/base.py": "class Gone(errors.StoreError): pass"},
        {"asymcheck/commit/synchronous_save.py": "def f():\n    class _Stop(BaseException): pass"},
    ],
    "nothing_is_unpickled": [
        *({"asymcheck/store.py": f"import {module}"} for module in ("pickle", "marshal", "shelve", "dill")),
        {"asymcheck/store.py": "def f():\n    from pickle import loads"},
        {"asymcheck/store.py": "__import__('pickle')"},
        {"asymcheck/store.py": "import torch\ntorch.load('x')"},
        {"asymcheck/store.py": "import torch.nn\nwrite = torch.save"},
        {"asymcheck/store.py": "import torch as t\nt.save(1, 'x')"},
        {"asymcheck/store.py": "from torch import load"},
        {"asymcheck/store.py": "from torch import serialization as s\ns.load('x')"},
        {"asymcheck/store.py": "import torch.serialization as s\ns.save(1, 'x')"},
        {"asymcheck/store.py": "import numpy as np\nnp.load('x', allow_pickle=True)"},
        {"asymcheck/store.py": "import numpy as np\nnp.load('x', allow_pickle=trusted)"},
        {"asymcheck/convert/torch_sink.py": "import torch\ntorch.load('x', weights_only=True)"},
        {"asymcheck/convert/torch_file.py": "import pickle\npickle.loads(b'')"},
        {"asymcheck/convert/dcp_folder.py": "import pickle\nclass U(pickle.Unpickler):\n  def find_class(s): pass"},
        {"asymcheck/convert/restricted_pickle.py": "import pickle\npickle.load(file)"},
        {"asymcheck/convert/restricted_pickle.py": "import pickle\nclass U(pickle.Unpickler):\n    pass"},
        {"asymcheck/convert/restricted_pickle.py": "import pickle\npickle.Unpickler(file).load()"},
        {"asymcheck/convert/restricted_pickle.py": "from pickle import loads"},
        {"asymcheck/convert/restricted_pickle.py": "import torch\ntorch.load('x', weights_only=True)"},
    ],
    "suppressions_give_a_reason": [
        {"asymcheck/store.py": "x = 1  # noqa"},
        {"asymcheck/store.py": "x = 1  # noqa: E501"},
        {"asymcheck/store.py": "x = 1  # noqa: E501 -"},
        {"asymcheck/store.py": "x = 1  # NOQA - because"},
        {"asymcheck/store.py": "# ruff: noqa\n"},
        {"tests/test_x.py": "x = 1  # type: ignore"},
        {"tools/demo.py": "x = 1  # type: ignore[attr-defined]"},
        {"tools/demo.py": "x = 1  # type: ignore  # because"},
        {"tools/demo.py": "x = 1  # type: ignore[attr-defined]  # noqa: E501 - long"},
        {"benchmarks/stall.py": "# mypy: ignore-errors\n"},
    ],
}

SOUND: dict[str, list[Sources]] = {
    "every_module_has_a_layer": [
        {"asymcheck/__init__.py": "", "asymcheck/storage/nvme/pack_writer.py": "", "tools/x.py": ""}
    ],
    "arrows_point_down": [
        {"asymcheck/__init__.py": "from asymcheck.checkpointer import Checkpointer"},
        {"asymcheck/cli/main.py": "import torch\nfrom asymcheck.store import Store\nfrom asymcheck.cli.x import x"},
    ],
    "siblings_do_not_import": [
        {"asymcheck/cli/convert.py": "from asymcheck.integrations import safetensors"},
        {"asymcheck/storage/nvme/pack_writer.py": "from asymcheck.storage.base import Tier"},
    ],
    "lowest_layer": [{"asymcheck/events.py": "import time\nfrom asymcheck.types import Step\nimport asymcheck.types"}],
    "no_import_of_the_public_interface": [
        {"asymcheck/cli/main.py": "from asymcheck.store import Store\nimport asymcheck.errors as errors"},
        {"asymcheck/storage/__init__.py": "from . import nvme"},
        {"tests/test_store.py": "from asymcheck import Store", "tools/demo.py": "import asymcheck"},
    ],
    "format_is_pure": [{"asymcheck/format/frame.py": "import struct", "asymcheck/storage/base.py": "import os"}],
    "storage_and_policies_know_no_torch": [
        {"asymcheck/storage/gpu_staging.py": "import torch", "asymcheck/storage/shm/pinned.py": "import torch"},
        {"asymcheck/state/flatten.py": "import torch"},
    ],
    "one_importer_each": [
        {
            "asymcheck/storage/nvme/catalog.py": "import lmdb",
            "asymcheck/format/digest.py": "import xxhash",
            "asymcheck/format/manifest.py": "import pyarrow as pa",
            "asymcheck/storage/remote/client.py": "from pyarrow import fs",
            "asymcheck/codecs/zstd.py": "import zstandard",
            "asymcheck/cli/verify.py": "import click",
            "tests/test_catalog.py": "import lmdb",
        }
    ],
    "shipped_code_stands_alone": [{"tools/demo.py": "from benchmarks.stall import run"}],
    "the_reference_reader_is_independent": [{"format_spec/reference_reader.py": "import struct, xxhash"}],
    "no_cycles": [
        {
            "asymcheck/storage/__init__.py": "from asymcheck.storage.nvme import Nvme",
            "asymcheck/storage/base.py": "",
            "asymcheck/storage/nvme.py": "from asymcheck.storage.base import Tier",
            "asymcheck/store.py": "import asymcheck.storage, asymcheck.storage.base",
        }
    ],
    "names_say_something": [{"asymcheck/storage/nvme/pack_writer.py": "", "asymcheck/commonality.py": ""}],
    "errors_are_our_own": [
        {"asymcheck/store.py": "from asymcheck.errors import Corrupt\nraise Corrupt('x') from error"},
        {"asymcheck/store.py": "from asymcheck import errors\nraise errors.Corrupt('x')"},
        {"asymcheck/store.py": "try:\n    f()\nexcept OSError as error:\n    raise"},
        {"asymcheck/store.py": "raise error\n"},
        {"asymcheck/store.py": "class A:\n    def f(self):\n        raise self._busy()"},
        {"asymcheck/storage/base.py": "class A:\n    @abstractmethod\n    def f():\n        raise NotImplementedError"},
        {"asymcheck/types.py": "def __getattr__(name):\n    raise AttributeError(name)"},
        {"asymcheck/types.py": "class A:\n    def __next__(self):\n        raise StopIteration"},
        {
            "asymcheck/cli/main.py": "import click\nraise click.UsageError('x')",
            "asymcheck/cli/x.py": "raise SystemExit(3)",
        },
        {"asymcheck/__main__.py": "raise SystemExit(main())", "tools/demo.py": "raise ValueError"},
    ],
    "errors_have_one_home": [
        {"asymcheck/errors.py": "class StoreError(Exception): pass\nclass Gone(StoreError): pass"},
        {"asymcheck/store.py": "class Store(Mapping): pass", "tools/x.py": "class X(Exception): pass"},
    ],
    "nothing_is_unpickled": [
        {"asymcheck/store.py": "import torch\nself.load('x')\nstore.save(torch.zeros(1))"},
        {"asymcheck/store.py": "import numpy as np\nnp.load('x', allow_pickle=False)"},
        {"benchmarks/rivals.py": "import torch, pickle\ntorch.save(1, 'x')"},
        {"asymcheck/convert/torch_sink.py": "import torch\ntorch.save(1, 'x')"},
        {"asymcheck/convert/restricted_pickle.py": "import pickle\nclass U(pickle.Unpickler):\n def find_class(): x"},
    ],
    "suppressions_give_a_reason": [
        {"asymcheck/store.py": "x = 1  # noqa: E501 - the vector is one line"},
        {"asymcheck/store.py": "x = 1  # noqa: E501, PLR2004 - the vector is one line"},
        {"asymcheck/store.py": "x = 1  # type: ignore[attr-defined]  # lmdb 1.4 has no stub for it"},
        {"asymcheck/store.py": "x = 1  # type: ignore[arg-type, misc]  # both, for one reason"},
        {"asymcheck/store.py": "x = '# noqa'  # a string is no comment"},
    ],
}


def _cases(table: dict[str, list[Sources]]) -> list[object]:
    return [
        pytest.param(name, sources, id=f"{name}-{number}")
        for name, examples in table.items()
        for number, sources in enumerate(examples)
    ]


def test_every_rule_has_examples_of_both_kinds() -> None:
    """Test that every rule has a violation to find, and valid code to accept."""
    assert set(BROKEN) == set(SOUND) == set(RULE)


@pytest.mark.parametrize(("name", "sources"), _cases(BROKEN))
def test_the_rule_catches_a_violation(name: str, sources: Sources) -> None:
    """Test that the rule finds the violation, and names one of the given files."""
    violations = list(RULE[name].check(SourceTree.from_sources(sources)))
    assert violations
    assert {violation.path for violation in violations} <= set(sources)
    assert all(violation.line >= 1 and violation.what for violation in violations)


@pytest.mark.parametrize(("name", "sources"), _cases(SOUND))
def test_the_rule_lets_sound_code_pass(name: str, sources: Sources) -> None:
    """Test that the rule accepts valid code."""
    assert not [str(violation) for violation in RULE[name].check(SourceTree.from_sources(sources))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_reason_is_a_sentence(rule: Rule) -> None:
    """Test that the reason of a rule says more than its name."""
    assert len(rule.reason.split()) >= 10
    assert rule.reason.endswith(".")
