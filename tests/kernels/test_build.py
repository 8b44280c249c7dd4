"""Which variant of a kernel is loaded, what its file's name depends on, and what is said where there is none."""

import ctypes
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from foretell.core.errors import ConfigError
from foretell.kernels import build, cpu, native
from foretell.kernels.build import BuildError, variant_of
from foretell.kernels.variants import KERNELS, VARIANTS, Kernel


@pytest.fixture(autouse=True)
def _warnings_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever level other tests have left: what is compiled goes to the log where that takes INFO."""
    caplog.set_level("WARNING", "foretell.kernels.build")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel ``two`` of two files; the second one is returned."""
    source, part = tmp_path / "whole.c", tmp_path / "parts" / "one.h"
    part.parent.mkdir()
    source.write_text('#include "parts/one.h"\nint two(void) { return ONE + 1; }\n')
    part.with_name("again.h").write_text('#include "one.h"\n')  # a circle ends
    part.write_text('#ifndef ONE\n#define ONE 1\n#include "again.h"\n#endif\n')
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "KERNELS", {"two": Kernel(str(source), (), ("baseline",))})
    return part


def test_a_library_is_built_again_when_an_included_file_changes(kernel: Path) -> None:
    first = next(build._libraries("two", "baseline"))
    assert next(build._libraries("two", "baseline")) == first
    kernel.write_text(kernel.read_text().replace("ONE 1", "ONE 41"))
    second = next(build._libraries("two", "baseline"))
    assert second != first
    assert ctypes.CDLL(str(second)).two() == 42
    assert [path.suffix for path in first.parent.iterdir()] == [".so", ".so"]  # and nothing else is left


def test_a_prebuilt_library_is_loaded_and_none_is_compiled(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_PREBUILT", tmp_path / "prebuilt")
    assert [path.parent.name for path in build.prebuild(tmp_path / "prebuilt")] == ["prebuilt"]
    monkeypatch.setattr(build, "_compiler", lambda: pytest.fail("a compiler was called"))
    build._load.cache_clear()
    assert build.load_library("two").two() == 2
    build._load.cache_clear()


def test_without_a_compiler_the_reason_is_said(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(BuildError, match="no C compiler"):
        build.load_library("two")


def test_compiling_is_told_to_a_terminal_or_to_logs(
    kernel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> str:
        kernel.write_text(kernel.read_text() + "\n")
        build._load.cache_clear()
        build.load_library("two")
        return capsys.readouterr().err

    assert load() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    first, second = load().splitlines()
    assert first == "foretell: compiling C kernels two for baseline, once ..."
    assert re.fullmatch(r"foretell: compiled C kernels two in \d+\.\d s", second)
    build._load.cache_clear()
    build.load_library("two")
    assert capsys.readouterr().err == "", "it lies there"
    with caplog.at_level("INFO", "foretell.kernels.build"):
        assert load() == ""
    assert [record.message.partition(" in ")[0] for record in caplog.records] == [
        "compiling C kernels two for baseline, once ...", "compiled C kernels two"
    ]  # fmt: skip
    build._load.cache_clear()


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory besides the cache, empty; nothing has been warned of."""
    (tmp_path / "temporary").mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(build, "_warned", [])
    build._load.cache_clear()
    return tmp_path / "temporary" / f"foretell-{os.getuid()}"


NO_SPACE = "two.c:1: fatal error: error writing: No space left on device\ncollect2: error: ld returned 1 exit status"


@pytest.mark.parametrize("how", ["read-only", "full for python", "full for the compiler", "runs no code"])
def test_a_cache_that_cannot_hold_code_is_replaced_by_a_directory_that_is_kept(
    how: str, kernel: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, compiled, compile_ = tmp_path / "cache", [], build._compile
    if how == "read-only":
        cache.write_text("a file")  # root may write to every directory

    def fill(compiler: str, name: str, variant: str, target: Path) -> None:
        compiled.append(target)
        if target.is_relative_to(cache) and how == "full for python":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if target.is_relative_to(cache) and how == "full for the compiler":
            raise subprocess.CalledProcessError(1, "cc", "", NO_SPACE)
        compile_(compiler, name, variant, target)

    def open_library(path: str) -> ctypes.CDLL:
        if how == "runs no code" and Path(path).is_relative_to(cache):
            raise OSError("failed to map segment from shared object")
        return load(path)

    load = ctypes.CDLL
    monkeypatch.setattr(build, "_compile", fill)
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    assert build.load_library("two").two() == 2
    assert [path.suffix for path in other.iterdir()] == [".so"]
    tries = len(compiled)
    build._load.cache_clear()
    assert build.load_library("two").two() == 2
    assert len(compiled) == tries, "compiled again at the next start"
    build._load.cache_clear()


@pytest.mark.parametrize("full", [True, False])
def test_a_failure_names_its_reason_and_the_way_out(
    full: bool, kernel: Path, other: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "cc", "", NO_SPACE if full else "one.c: error: no")

    monkeypatch.setattr(build, "_compile", fail)
    reason = "No space left on device; make room in " if full else "error: no; name another compiler by CC"
    for _ in range(2):
        with pytest.raises(BuildError, match=reason):
            build.load_library("two")
    (said,) = caplog.messages  # once
    assert said.startswith("C kernels two runs by torch, which is slower: ")
    assert reason in said


def test_what_is_compiled_again_at_every_start_says_so(
    kernel: Path, other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    other.write_text("another file")
    assert build.load_library("two").two() == 2
    (said,) = caplog.messages
    assert "at every start; set FORETELL_CACHE" in said
    build._load.cache_clear()


ALL = frozenset(flag for variant in VARIANTS.values() for flag in variant.needs)
X86 = ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2"]
ARM = ["neon_i8mm", "neon_dot", "neon"]


@pytest.fixture
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("lacks", "best", "chosen"),
    [
        ((), None, "amx"),
        (("amx_int8",), None, "avx512_bf16"),
        (("avx512_bf16",), None, "avx512_vnni"),
        (("avx512_bf16", "avx512_vnni"), None, "avx512"),
        (("avx512dq",), None, "avx2"),
        ((), "avx2", "avx2"),
        ((), "avx512_bf16", "avx512_bf16"),
        ((), "avx512", "avx512"),
        (("avx512bw",), "avx512", "avx2"),
    ],
)
@pytest.mark.usefixtures("x86")
def test_the_best_variant_that_the_cpu_has_and_the_user_allows_is_chosen(
    lacks: tuple[str, ...], best: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: ALL - set(lacks))
    monkeypatch.setattr(build, "amx_permitted", lambda: True)
    monkeypatch.setattr(build, "vendor", lambda: "AuthenticAMD")
    monkeypatch.delenv("FORETELL_AMX", raising=False)
    monkeypatch.setenv("FORETELL_ISA", best or "")
    assert variant_of("native") == chosen
    small = variant_of("race")
    assert small == ("avx2" if chosen == "avx2" else "avx512")


@pytest.mark.parametrize(("permitted", "wanted", "chosen"), [(True, "1", 0), (False, "1", 1), (True, "0", 1)])
@pytest.mark.usefixtures("x86")
def test_amx_runs_where_the_system_permits_it_and_the_user_does_not_turn_it_off(
    permitted: bool, wanted: str, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: ALL)
    monkeypatch.setattr(build, "amx_permitted", lambda: permitted)
    monkeypatch.setattr(build, "vendor", lambda: "")
    monkeypatch.setenv("FORETELL_AMX", wanted)
    monkeypatch.delenv("FORETELL_ISA", raising=False)
    assert build.variants_of("native") == X86[chosen:]
    monkeypatch.setenv("FORETELL_ISA", "amx")
    assert variant_of("native") == X86[chosen]


@pytest.mark.parametrize(
    ("permitted", "best", "chosen"),
    [
        (True, "", ["amx", "avx512_vnni", "avx512", "avx2"]),
        (False, "", ["avx512_vnni", "avx512", "avx2"]),
        (False, "amx", ["avx512_vnni", "avx512", "avx2"]),
        (False, "avx512_bf16", ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
    ],
)
@pytest.mark.usefixtures("x86")
def test_by_intel_products_of_pairs_run_only_where_they_are_asked_for(
    permitted: bool, best: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: ALL)
    monkeypatch.setattr(build, "amx_permitted", lambda: permitted)
    monkeypatch.setattr(build, "vendor", lambda: "GenuineIntel")
    monkeypatch.delenv("FORETELL_AMX", raising=False)
    monkeypatch.setenv("FORETELL_ISA", best)
    assert build.variants_of("native") == chosen


@pytest.mark.parametrize(
    ("words", "best", "chosen"),
    [
        ({16: 0x887}, "", ["neon"]),  # Raspberry Pi 4: fp asimd evtstrm crc32 cpuid
        ({16: 0x100FFF, 26: 0}, "", ["neon_dot", "neon"]),  # Neoverse N1
        ({16: 0x100FFF, 26: 1 << 13}, "", ARM),
        ({16: 0x100FFF, 26: 1 << 13}, "neon_dot", ["neon_dot", "neon"]),
    ],
)
def test_on_arm_the_features_of_the_cpu_choose(
    words: dict[int, int], best: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for module in (build, cpu):
        monkeypatch.setattr(module, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu, "_auxiliary", lambda word: words.get(word, 0))
    monkeypatch.setattr(build, "cpu_flags", cpu.cpu_flags.__wrapped__)
    monkeypatch.setenv("FORETELL_ISA", best)
    assert build.variants_of("native") == chosen
    monkeypatch.delenv("FORETELL_ISA")
    assert variant_of("race") == "baseline"
    monkeypatch.setenv("FORETELL_ISA", "avx2")
    with pytest.raises(ConfigError, match=f"it must be one of {', '.join(ARM)}, baseline"):
        variant_of("native")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands over an auxiliary vector")
def test_the_kernel_tells_a_process_of_its_machine() -> None:
    assert cpu._auxiliary(6) == os.sysconf("SC_PAGE_SIZE")  # AT_PAGESZ


def test_on_darwin_the_system_is_asked_for_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's M1: no i8mm and no bf16."""
    has = {"hw.optional.AdvSIMD": 1, "hw.optional.arm.FEAT_LSE": 1, "hw.optional.arm.FEAT_DotProd": 1}
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: None)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(cpu, "_sysctl", lambda name: has.get(name, 0))
    assert cpu.cpu_flags.__wrapped__() == {"asimd", "atomics", "asimddp"}


@pytest.mark.parametrize(
    ("said", "known"), [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64")]
)
def test_a_machine_has_one_name(said: str, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: said)
    assert cpu.machine() == known


def test_apple_s_clang_is_given_openmp_as_it_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no -fopenmp of its own, ends at flags that it does not know, and its linker must be told that the runtime is
    there later."""
    said: list[list[str]] = []
    target, clang = tmp_path / "made.so", tmp_path / "cc"
    clang.touch()

    def run(command: list[str]) -> str:
        said.append(command)
        target.with_suffix(".o").touch()
        return "arm64-apple-darwin24.0.0\n" if command[1] == "-dumpmachine" else "Apple clang version 17.0.0\n"

    monkeypatch.setattr(build, "_run", run)
    build._compile(str(clang), "native", "neon", target)
    (*_, compiled, linked) = said
    assert compiled[compiled.index("-fopenmp") - 1] == "-Xclang"
    assert "-march=armv8-a" in compiled
    assert "-fno-thread-jumps" not in compiled
    assert linked[1:4] == ["-shared", "-undefined", "dynamic_lookup"]


def test_for_windows_a_library_brings_its_threads_and_no_aligned_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC cannot align the stack there as its own moves of AVX need it."""
    said: list[list[str]] = []
    target, gcc = tmp_path / "made.so", tmp_path / "gcc"
    gcc.touch()

    def run(command: list[str]) -> str:
        said.append(command)
        target.with_suffix(".o").touch()
        return "x86_64-w64-mingw32\n"

    monkeypatch.setattr(build, "_run", run)
    build._compile(str(gcc), "native", "avx2", target)
    (*_, compiled, linked) = said
    assert "-Wa,-muse-unaligned-vector-move" in compiled
    assert "-static" in linked


@pytest.mark.parametrize(
    ("target", "variants"),
    [
        ("x86_64-linux-gnu", [*X86, "baseline"]),
        ("arm64-apple-darwin24.0.0", [*ARM, "baseline"]),
        ("riscv64-linux-gnu", ["baseline"]),
    ],
)
def test_a_wheel_gets_the_variants_of_the_compiler_s_machine(
    target: str, variants: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(build, "KERNELS", {"native": KERNELS["native"], "race": KERNELS["race"]})
    monkeypatch.setattr(build, "_compiler", lambda: "cc")
    monkeypatch.setattr(build, "_target", lambda compiler: target)
    monkeypatch.setattr(build, "_compile", lambda compiler, name, variant, path: made.append(f"{name} {variant}"))
    assert len(build.prebuild(tmp_path)) == len(made)
    small = [name for name in variants if name in ("avx512", "avx2", "baseline")]
    assert sorted(made) == sorted(
        [f"native {name}" for name in variants if name != "baseline"] + [f"race {name}" for name in small]
    )


def test_a_wheel_s_kernels_are_compiled_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(build, "KERNELS", {"one": KERNELS["suffix"], "other": KERNELS["suffix"]})
    monkeypatch.setattr(build, "num_cores", lambda: 2)
    monkeypatch.setattr(build, "_compile", lambda *_: both.wait())
    assert [path.name.partition("-")[0] for path in build.prebuild(tmp_path)] == ["one", "other"]


def test_of_several_errors_of_a_wheel_s_kernels_the_first_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(compiler: str, name: str, variant: str, path: Path) -> None:
        raise OSError(name)

    monkeypatch.setattr(build, "_compile", compiled)
    with pytest.raises(OSError, match=r"^bounds$"):
        build.prebuild(tmp_path)


def test_the_cpu_s_maker_is_known_where_the_system_says() -> None:
    file = Path("/proc/cpuinfo")
    if not file.exists():
        pytest.skip("the system does not say")
    assert cpu.vendor() in ("", *(word for line in file.read_text().splitlines() for word in line.split()))


def test_a_variant_that_cannot_be_built_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An old compiler: the next variant runs, which is said, and where none can be built the best one's reason is told."""
    monkeypatch.setattr(build, "_warned", [])
    built = ctypes.CDLL(None)
    monkeypatch.setattr(native, "variants_of", lambda name: ["amx", "avx512_bf16"])
    monkeypatch.setattr(native, "_library", lambda name: (None, "no AMX") if name == "amx" else (built, None))
    assert native.library() == (built, None)
    assert native.variant() == "avx512_bf16"
    assert caplog.messages == ["C kernels run as avx512_bf16, which is slower than amx: no AMX"]
    monkeypatch.setattr(native, "_library", lambda name: (None, f"no {name}"))
    assert native.library() == (None, "no amx")
    assert native.variant() is None


@pytest.mark.usefixtures("x86")
def test_where_nothing_fits_the_reason_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: ALL - {"fma"})
    with pytest.raises(BuildError, match="the CPU lacks fma"):
        variant_of("native")
    assert variant_of("race") == "baseline"
    monkeypatch.setattr(build, "cpu_flags", frozenset)
    with pytest.raises(BuildError, match="instructions are not known"):
        variant_of("native")
    monkeypatch.setenv("FORETELL_ISA", "baseline")
    with pytest.raises(BuildError, match="no variant baseline"):
        variant_of("native")


@pytest.mark.usefixtures("x86")
def test_an_unknown_variant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_ISA", "avx9")
    with pytest.raises(ConfigError, match="'avx9'; it must be one of amx, avx512_bf16"):
        variant_of("native")


def test_torch_knows_the_cpu_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cpu.cpu_flags()
    if not known:
        pytest.skip("the system does not say")
    said = cpu._cpu_flags_of_torch()
    if not said:
        pytest.skip("this torch does not say")
    assert known & ALL == said & ALL


def test_every_kernel_has_its_source_and_variants_best_first() -> None:
    order = list(VARIANTS)
    for name, kernel in KERNELS.items():
        assert build._source(name).exists()
        assert sorted(kernel.variants, key=order.index) == list(kernel.variants)


def test_the_package_needs_no_torch_to_be_prebuilt() -> None:
    code = "import sys; import foretell.kernels.build; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(Path(build.__file__).parents[2]), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="processes have no groups here")
def test_a_compiler_that_takes_too_long_is_ended_with_what_it_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "pid"
    for limit in (0.5, 5.0, 30.0):  # on a busy machine the shell may be ended before it has said anything
        monkeypatch.setattr(build, "_TIMEOUT_S", limit)
        with pytest.raises(subprocess.TimeoutExpired):
            build._run(["sh", "-c", f"sleep 60 & echo $! > {told}.part && mv {told}.part {told}; wait"])
        if told.exists():
            break
    child = int(told.read_text())
    for _ in range(100):  # its end is told to whoever adopted it, a moment later
        try:
            state = Path(f"/proc/{child}/stat").read_text().split()[2] if Path("/proc").is_dir() else "R"
            os.kill(child, 0)
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the program that was called is still at work")


def test_a_compiler_is_asked_for_its_version_once_and_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, asked = tmp_path / "cc", []

    def run(command: list[str]) -> str:
        asked.append(command)
        return f"cc {len(asked)}\n"

    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(build, "_run", run)
    first = [build._compiled_name("suffix", "baseline") for _ in range(3)]
    assert (first[0], len(asked)) == (first[2], 1)
    os.utime(compiler, ns=(1, 1))
    assert build._compiled_name("suffix", "baseline") != first[0]


def test_a_failed_compilation_is_an_error_with_its_words() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        build._run(["sh", "-c", "echo 'one.c: error: no' >&2; exit 3"])
    assert build._last_line(caught.value) == "one.c: error: no"
    assert build._run(["sh", "-c", "echo yes"]) == "yes\n"


@pytest.mark.parametrize("kept", [0, 10, 700, 0.9])
def test_a_library_that_was_cut_short_is_built_again(kernel: Path, kept: float) -> None:
    built = next(build._libraries("two", "baseline"))
    whole = built.read_bytes()
    built.write_bytes(whole[: int(kept if kept != 0.9 else kept * len(whole))])
    assert not build.is_whole(built)
    build._load.cache_clear()
    assert build.load_library("two").two() == 2  # loading what was cut may end the process
    build._load.cache_clear()
    assert build.is_whole(built)


def test_a_compiler_that_says_nothing_of_its_version(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "cc"
    silent.write_text(f'#!/bin/sh\n[ "$1" = --version ] || exec {build._compiler()} "$@"\n')
    silent.chmod(0o755)
    monkeypatch.setenv("CC", str(silent))
    build._load.cache_clear()
    assert build.load_library("two").two() == 2
    build._load.cache_clear()


def test_the_openmp_runtime_is_the_one_that_torchs_code_calls(tmp_path: Path) -> None:
    """A process may have others too, and their paths may have blanks."""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12                         /opt/lib/libstdc++.so.6\n"
        "7f01-7f02 rw-p 00000000 00:00 0 \n"
        "7f02-7f03 r-xp 00000000 08:01 13                         /home/my name/site packages/libgomp-a34b3233.so.1.0.0\n"
        "7f03-7f04 r-xp 00000000 08:01 14                         /opt/lib/libgomp.so.1\n"
    )
    assert native.loaded_openmp(maps) == Path("/home/my name/site packages/libgomp-a34b3233.so.1.0.0")
    assert native.loaded_openmp(tmp_path / "none") is None
    import torch

    mine = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    found = native.openmp_runtime()
    assert found is not None
    assert found.samefile(native.home_of(mine.omp_get_max_threads) or "")
