"""What is released: a wheel that is complete and alone, made from a source distribution that is complete."""

import email
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml

import cachemuon

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = """
import sys; sys.path.insert(0, sys.argv[1])
import torch, cachemuon, cachemuon_lab
W = torch.nn.Parameter(torch.ones(8, 16))
W.grad = torch.eye(8, 16)
cachemuon.CacheMuon([W]).step()
print(cachemuon.__file__, cachemuon_lab.__file__, cachemuon.__version__, bool((W < 1).any()), sep="|")
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-I", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))  # the wheel from the sdist
    return folder


def test_the_wheel_has_both_packages_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        about = f"cachemuon-{cachemuon.__version__}.dist-info"
        metadata = email.message_from_string(wheel.read(f"{about}/METADATA").decode())
    assert path.name == f"cachemuon-{cachemuon.__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {"cachemuon", "cachemuon_lab", about}
    sources = ROOT.glob("src/cachemuon*/**/*.py")
    assert {str(path.relative_to(ROOT / "src")) for path in sources} <= names
    assert {"cachemuon/py.typed", "cachemuon_lab/py.typed", f"{about}/licenses/LICENSE"} <= names
    assert metadata["Version"] == cachemuon.__version__ and metadata["License-Expression"] == "Apache-2.0"
    needs = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert [need.partition("<")[0] for need in needs] == ["torch"]
    assert metadata.get_payload().startswith("# CacheMuon")


def test_the_source_distribution_can_be_tested(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = ["Makefile", "constraints.txt", "mkdocs.yml", "CITATION.cff", "tests/conftest.py"]
    wanted += [str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.*")]
    assert set(wanted) <= names
    assert not {name.split("/")[0] for name in names} & {".venv", "runs", "site", "dist", ".git"}


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_what_is_installed_steps(built, tmp_path, kind):
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "-q")
    run("-m", "pip", "install", *offline, "--target", str(tmp_path), str(next(built.glob(kind))))
    *files, version, stepped = run("-c", TRAIN, str(tmp_path)).strip().split("|")
    assert all(pathlib.Path(file).is_relative_to(tmp_path) for file in files)
    assert (version, stepped) == (cachemuon.__version__, "True")


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == cachemuon.__version__
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Dev", "Bohara", "Takáč", "Horváth"]


def test_the_change_log_knows_this_version():
    assert f"\n## [{cachemuon.__version__}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
