"""Mutual TLS between the processes of a run, by JAX's own variables."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from dtrain.core.process_info import ProcessInfo
from dtrain.parallel.devices import TLS
from tests.conftest import PACED, Dtrain, bare_environment
from tests.waiting import until

SUPPORTED = hasattr(jax.config, TLS[0].lower())
RECIPE = """
model: {kind: mlp, sizes: [64, 32, 10]}
data: digits
optimizer: {kind: adamw, lr: 1e-3}
batch: 64
steps: 100000
evaluate: {every: 0}
"""


def certificates(folder: Path) -> dict[str, str]:
    """The variables for a certificate of the loopback address, from an authority of its own."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl("req", *new[:3], "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=process")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "own.csr", *signing, "-out", "own.pem")
    return dict(zip(TLS, (str(folder / name) for name in ("own.pem", "own.key", "ca.pem")), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(SUPPORTED, reason="this JAX has TLS between processes")
def test_tls_that_this_jax_would_ignore_is_refused(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    asked = dtrain("run", "small.yaml", "--devices", "2", "--processes", "2", code=3, **{TLS[0]: "own.pem"})
    assert "has no TLS between processes" in asked.stderr
    assert f"hint: use JAX 0.12 or newer, or unset {TLS[0]}" in asked.stderr


@pytest.mark.skipif(not SUPPORTED, reason="this JAX has no TLS between processes")
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed here")
def test_the_coordinator_shows_its_certificate_and_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
    environment = bare_environment() | PACED | certificates(tmp_path) | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "dtrain", "run", "small.yaml", "--devices", "2"]
    processes = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment | ProcessInfo(rank, 2, address).environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        shown, end = "", time.monotonic() + 200
        while "subject=CN" not in shown and time.monotonic() < end:
            done = subprocess.run(
                ["openssl", "s_client", "-connect", address, "-alpn", "h2"],
                input="", capture_output=True, text=True, timeout=20, check=False,
            )  # fmt: skip
            shown = done.stdout + done.stderr
            time.sleep(0.5)
        assert "subject=CN = process" in shown
        assert "Requested Signature Algorithms" in shown  # of the client's certificate
        log = tmp_path / "runs" / "small" / "log.txt"
        until(lambda: log.exists() and "step " in log.read_text())
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=200)
