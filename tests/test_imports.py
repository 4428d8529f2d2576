"""Who may import whom, read from the sources alone; and the sizes and names of files."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# each may import those to its right, and itself
ORDER = ["agent", "leaderboard", "generated", "verifier", "reference_kernels", "primitives"]
MAX_LINES = 600


def sources(*folders):
    return sorted(p for f in folders for p in (ROOT / f).rglob("*.py") if "__pycache__" not in p.parts)


def imports(path):
    """(line, dotted module) of every import of ours, wherever it stands in the file; relative ones resolved."""
    found = []
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            found += [(node.lineno, module), *((node.lineno, f"{module}.{a.name}") for a in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found += [(node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant)]
    return found


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package):
    above = ORDER[: ORDER.index(package)]
    files = sources(package)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in imports(path)
        if module.split(".")[0] in above
    ]
    assert wrong == []


def test_the_scan_sees_what_it_forbids(tmp_path):
    package = ROOT / "verifier"
    assert ("verifier.verdict" in {m for _, m in imports(package / "gpu.py")}) and (
        "primitives.interpret" in {m for _, m in imports(package / "worker.py")}  # inside a function
    )


def test_every_package_is_in_the_order_and_is_installed():
    here = {p.parent.name for p in ROOT.glob("*/__init__.py")} - {"tests"}
    assert here == set(ORDER)
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {".".join(p.parent.relative_to(ROOT).parts) for f in ORDER for p in (ROOT / f).rglob("__init__.py")}
    assert packages == set(installed)


@pytest.mark.parametrize("module", ["verifier.gpu_worker", "verifier.worker"])
def test_the_processes_that_run_kernels_never_load_the_agent(module):
    """Transitively, in a real process: authors, prompts and the library stay out of the worker that measures."""
    forbidden = ["agent", "leaderboard", "generated"]
    if module == "verifier.worker":
        forbidden += ["reference_kernels"]
    code = (
        f"import sys, importlib; importlib.import_module({module!r}); import primitives.interpret\n"
        f"print(sorted(m for m in sys.modules if m.split('.')[0] in {forbidden!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.strip() == "[]"


def test_the_measuring_side_names_no_candidate():
    """Neither the GPU worker nor anything it imports from us loads Python from a path, except a user's reference."""
    for name in ("gpu_worker", "launch", "timing", "numerics", "manifest"):
        path = ROOT / "verifier" / f"{name}.py"
        names = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not names & {"exec_module", "spec_from_file_location", "import_module", "run_path"}, path.name


@pytest.mark.parametrize("path", sorted((ROOT / "generated").glob("*/*.py")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_kernel_files_import_primitives_only(path):
    found = imports(path)
    assert found and all(m == "primitives" or m.startswith("primitives.") and m.count(".") == 1 for _, m in found)


def test_only_the_device_package_imports_the_compiler():
    """Everything else must work where CuTeDSL is not installed."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(*ORDER)
        if path.parent.name != "device"
        for node in ast.parse(path.read_text()).body  # at import time, not inside a function
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] in ("cutlass", "quack", "tvm_ffi", "triton")
    ]
    assert wrong == []


def test_no_module_is_called_utils_or_helpers():
    vague = {"utils", "util", "helpers", "helper"}
    assert [
        str(p.relative_to(ROOT)) for p in sources(*ORDER, "tests") if p.stem in vague or p.parent.name in vague
    ] == []


def test_no_file_is_longer_than_600_lines():
    lengths = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources(*ORDER, "tests", "benchmarks")
    }
    assert {p: n for p, n in lengths.items() if n > MAX_LINES} == {}
