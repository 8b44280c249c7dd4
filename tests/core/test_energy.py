"""Joules from a made directory of counters."""

from pathlib import Path

import pytest

from foretell.core.energy import Energy

RANGE = 1_000_000


def zone(directory: Path, name: str, kind: str, microjoules: int, range_uj: int = RANGE) -> Path:
    """One counter, as Linux has it."""
    made = directory / name
    made.mkdir()
    (made / "name").write_text(f"{kind}\n")
    (made / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (made / "energy_uj").write_text(f"{microjoules}\n")
    return made / "energy_uj"


def test_packages_and_their_memory_are_summed_and_nothing_twice(tmp_path: Path) -> None:
    counted = [
        zone(tmp_path, "intel-rapl:0", "package-0", 100),
        zone(tmp_path, "intel-rapl:0:2", "dram", 200),
        zone(tmp_path, "intel-rapl:1", "package-1-die-0", 300),
    ]
    twice = [
        zone(tmp_path, "intel-rapl:0:0", "core", 100),
        zone(tmp_path, "intel-rapl:0:1", "uncore", 100),
        zone(tmp_path, "intel-rapl:2", "psys", 100),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 100),
    ]
    (tmp_path / "intel-rapl").mkdir()
    energy = Energy.of(tmp_path)
    assert energy is not None
    assert energy.joules() == 0.0
    for number, counter in enumerate(counted):
        counter.write_text(str(500_000 + number))
    for counter in twice:
        counter.write_text("900000")
    assert energy.joules() == (3 * 500_000 + 3 - 600) / 1e6
    assert energy.joules() == (3 * 500_000 + 3 - 600) / 1e6, "nothing was used since"


def test_a_counter_that_goes_round_is_followed(tmp_path: Path) -> None:
    one = zone(tmp_path, "intel-rapl:0", "package-0", 999_000)
    other = zone(tmp_path, "intel-rapl:1", "package-1", 5, range_uj=50)
    energy = Energy.of(tmp_path)
    assert energy is not None
    told = []
    for first, second in ((1_000, 45), (500, 4), (500, 4)):
        one.write_text(str(first))
        other.write_text(str(second))
        told.append(energy.joules())
    assert told == pytest.approx([0.002040, 1.001549, 1.001549])


@pytest.mark.parametrize("missing", ["energy_uj", "max_energy_range_uj", "name"])
def test_a_machine_that_does_not_tell_all_tells_nothing(tmp_path: Path, missing: str) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    assert Energy.of(tmp_path) is not None
    zone(tmp_path, "intel-rapl:1", "package-1", 1)
    (tmp_path / "intel-rapl:1" / missing).unlink()
    assert Energy.of(tmp_path) is None


def test_no_counters_no_figure(tmp_path: Path) -> None:
    assert Energy.of(tmp_path / "none") is None
    zone(tmp_path, "intel-rapl:0:0", "core", 1)
    assert Energy.of(tmp_path) is None


def test_a_counter_that_is_denied_later_ends_the_figure_and_loses_nothing(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    energy = Energy.of(tmp_path)
    assert energy is not None
    counter.unlink()
    assert energy.joules() is None
    counter.write_text("7000000")
    assert energy.joules() == 7.0
