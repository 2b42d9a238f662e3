"""The package from outside: an instant import, public names that exist, pages that match the code."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import epimer

ROOT = Path(__file__).parents[2]


def test_importing_epimer_does_not_import_torch():
    code = "import sys, epimer; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_had():
    for name in epimer.__all__:
        assert getattr(epimer, name) is not None
    assert set(epimer.__all__) <= set(dir(epimer))
    with pytest.raises(AttributeError, match="no attribute 'merg'"):
        epimer.merg  # noqa: B018


def test_the_methods_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert page == generate.render(), "run `make docs`"


def test_version_agrees_with_the_project_file():
    assert f'version = "{epimer.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


WITHOUT_NETWORK = """
import sys
import zipfile

def refuse(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        raise RuntimeError(f"the network was used: {event} {arguments}")

sys.addaudithook(refuse)
"""
EVERY_MODULE = """
import importlib, pkgutil, epimer
names = [one.name for one in pkgutil.walk_packages(epimer.__path__, "epimer.") if not one.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
LOCAL_MERGE = """
import os, torch, epimer
from safetensors.torch import save_file
for name in ("one", "two"):
    os.mkdir(name)
    save_file({"w": torch.ones(2, 2)}, f"{name}/model.safetensors")
epimer.merge({"merge_method": "average", "models": [{"model": "one"}, {"model": "two"}]}, "out", progress=False)
"""
HELP = "import sys; sys.argv = ['epimer', '--help']; from epimer.cli import main; main()"
RESOLVE = "import socket; socket.getaddrinfo('localhost', 80)"


@pytest.mark.parametrize("code", [EVERY_MODULE, HELP, LOCAL_MERGE], ids=["import", "help", "merge"])
def test_imports_help_and_local_merges_use_no_network(code, tmp_path):
    """Not even to look up a name: an audit hook sees every socket, whichever library opens it."""
    command = [sys.executable, "-c", WITHOUT_NETWORK + code]
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=online, check=False)
    assert done.returncode == 0, done.stderr
    if code is EVERY_MODULE:
        assert int(done.stdout) + 2 == len(list(Path(epimer.__file__).parent.rglob("*.py")))  # not itself, not main


def test_the_hook_of_the_test_above_sees_a_name_looked_up():
    done = subprocess.run([sys.executable, "-c", WITHOUT_NETWORK + RESOLVE], capture_output=True, check=False)
    assert b"the network was used: socket.getaddrinfo" in done.stderr


def test_the_wheel_holds_the_package_its_licence_and_nothing_else(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {one.filename: one.file_size for one in archive.infolist()}
        record = archive.read(next(name for name in sizes if name.endswith("RECORD"))).decode()
    sources = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "epimer").rglob("*") if path.is_file()}
    about = f"epimer-{epimer.__version__}.dist-info"
    facts = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert sizes.keys() == {path.as_posix() for path in sources if path.parent.name != "__pycache__"} | facts
    assert {"epimer/py.typed", "epimer/report/page.css", "epimer/report/page.js"} <= sizes.keys()
    assert {Path(name).suffix for name in sizes.keys() - facts} == {".py", ".typed", ".css", ".js", ".yaml"}
    assert max(sizes.values()) < 100_000
    assert record.count("sha256=") == len(sizes) - 1  # every file but the record itself
