"""Test that integrations do not import other libraries unless used."""

import subprocess
import sys

import pytest

CODE = """
import sys
import asymcheck, asymcheck.cli.main, asymcheck.convert.convert
import asymcheck.integrations.accelerate, asymcheck.integrations.deepspeed, asymcheck.integrations.exporters
heavy = "transformers accelerate lightning torchdata deepspeed torch.distributed.checkpoint safetensors".split()
heavy += ["tensorboard", "prometheus_client", "opentelemetry"]
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.slow
def test_integrations_are_imported_on_demand() -> None:
    """Test the package, its commands and converters."""
    done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
