"""Native code is built once for what it is made from, whole or not at all, and every failure says what to do."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from portable.errors import BackendUnavailableError
from portable.kernels import aten, native_code, registry
from portable.kernels.native_code import NativeCode


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "tiny" / "tiny.cc"
    path.parent.mkdir()
    path.write_text('#include "tiny.h"\nextern "C" int portable_tiny() { return TINY; }\n')
    path.with_name("tiny.h").write_text("#define TINY 1\n")
    return path


def test_it_is_built_once(cache, source, caplog):
    first = NativeCode(source, "portable_tiny").built()
    when = first.stat().st_mtime_ns
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "once" in caplog.text
    assert NativeCode(source, "portable_tiny").built() == first
    assert first.stat().st_mtime_ns == when
    assert len(caplog.records) == 1
    assert [p.suffix for p in sorted(cache.iterdir())] == [".lock", ".so"]


def test_the_first_build_against_torch_says_that_it_takes_about_half_a_minute(cache, source, caplog):
    NativeCode(source, "portable_tiny", torch=True).built()
    assert "half a minute" in caplog.text


def test_a_changed_source_or_header_or_cpu_is_built_anew(cache, source, monkeypatch):
    built = {NativeCode(source, "portable_tiny").built()}
    source.with_name("tiny.h").write_text("#define TINY 2\n")
    built.add(NativeCode(source, "portable_tiny").built())
    source.write_text(source.read_text() + "\n")
    built.add(NativeCode(source, "portable_tiny").built())
    monkeypatch.setattr(native_code, "_cpu", lambda: "another")
    built.add(NativeCode(source, "portable_tiny").built())
    assert len(built) == 4


def test_two_processes_build_one_library(cache, source):
    code = f"""
        from pathlib import Path
        from portable.kernels.native_code import NativeCode
        print(NativeCode(Path({str(source)!r}), "portable_tiny").built())
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd())
        for _ in range(2)
    ]
    outputs = [p.communicate(timeout=120) for p in running]
    assert [p.returncode for p in running] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum(err.count("building the kernels") for _, err in outputs) == 1


def test_without_a_compiler_the_error_says_how_to_get_on(cache, source, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match=r"tiny\.cc need a C\+\+ compiler[^$]*Remedy: install g\+\+"):
        NativeCode(source, "portable_tiny").built()


def test_a_compiler_that_cxx_names_and_that_is_absent_is_named(cache, source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(BackendUnavailableError, match="CXX names 'no-such-compiler'"):
        NativeCode(source, "portable_tiny").built()


def test_a_source_that_does_not_compile_gives_the_compilers_words_and_leaves_nothing(cache, source):
    source.write_text("no C++ at all\n")
    with pytest.raises(BackendUnavailableError, match=r"could not build tiny\.cc:[^$]*error"):
        NativeCode(source, "portable_tiny").built()
    assert [p.suffix for p in cache.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BackendUnavailableError, match="cannot be built in .*file[^$]*PORTABLE_CACHE_DIR"):
        NativeCode(source, "portable_tiny").built()


def test_a_library_that_is_no_library_is_named_with_the_remedy(cache, source):
    code = NativeCode(source, "portable_tiny")
    code.built().write_bytes(b"truncated")
    with pytest.raises(BackendUnavailableError, match=r"\.so of the kernel target portable_tiny [^$]*remove that file"):
        code.register()


def test_a_library_without_the_symbol_is_named(cache, source):
    with pytest.raises(BackendUnavailableError, match="kernel target portable_other cannot be loaded"):
        NativeCode(source, "portable_other").register()


def test_a_kernels_digest_covers_its_native_code(source):
    def kernel(x):
        return x

    before = registry._digest(kernel, NativeCode(source, "portable_tiny").sources)
    source.with_name("tiny.h").write_text("#define TINY 2\n")
    assert registry._digest(kernel, NativeCode(source, "portable_tiny").sources) != before


def test_the_sources_of_every_kernel_are_packaged():
    from portable.kernels.cumsum import cpp as cumsum
    from portable.kernels.rms_norm import cpp as rms_norm

    names = {p.name for code in (aten.CODE, cumsum.CODE, rms_norm.CODE) for p in code.sources}
    assert names == {"aten_ffi.cc", "cumsum.cc", "rms_norm.cc", "native.h"}
    packaged = (Path(native_code.__file__).parents[2] / "setup.py").read_text()
    assert all(f'"**/*{suffix}"' in packaged for suffix in {Path(n).suffix for n in names})
