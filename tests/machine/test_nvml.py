"""GPUs by NVML: the real nvidia-ml-py on a made library, which answers, refuses, fails half-way and is lost."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dlbench.records.throttle_reasons import CLOCK_REASONS
from tests.support.nvml_library import build, variables

needs_library = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
pytest.importorskip("pynvml")

READER = """
import json, sys
from dlbench.machine.nvml import open_nvml
source = open_nvml()
told = {"fields": [[f.name, f.kind, f.is_slow] for f in source.fields], "unavailable": source.unavailable,
        "facts": source.describe(), "reads": [], "failures": []}
for slow in json.loads(sys.argv[1]):
    told["reads"].append(source.read(slow=slow))
    told["failures"].append(source.drain_failures())
source.close()
told["closed"] = source.read(slow=True)
print(json.dumps(told))
"""


GPM = {
    "sm_active": 0.12,
    "sm_occupancy": 0.13,
    "tensor_active": 0.15,
    "dram_active": 0.2,
    "pcie_received_mean_bytes_per_s": 31 * 2**20,
    "pcie_sent_mean_bytes_per_s": 30 * 2**20,
    "nvlink_received_bytes_per_s": 70 * 2**20,
    "nvlink_sent_bytes_per_s": 71 * 2**20,
}
"""What the made library answers."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def ask(folder: Path, reads: tuple[bool, ...] = (True,), code: str = READER, **switches: object) -> dict[str, Any]:
    """Opens NVML in a process of its own and reads as often as asked; `reads` says of each whether it is slow."""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(reads)],
        env={**os.environ, **variables(folder, **switches)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def values(told: dict[str, Any], number: int = 0) -> dict[str, float]:
    return dict(zip([name for name, _, _ in told["fields"]], told["reads"][number], strict=True))


@needs_library
def test_two_healthy_gpus(library: Path) -> None:
    told = ask(library, power_w=250)
    read = values(told)
    assert told["unavailable"] == {}
    assert {name.split(".")[1] for name in read} == {"0", "1"}
    energy = read.pop("gpu.0.energy_j")
    assert 1000 <= energy < 1000 + 60 * 250
    for gpm, value in GPM.items():
        assert read.pop(f"gpu.0.{gpm}") == pytest.approx(value)
    assert {k: v for k, v in read.items() if k.startswith("gpu.0.")} == {
        "gpu.0.power_w": 250,
        "gpu.0.sm_clock_hz": 1.755e9,
        "gpu.0.sm_clock_max_hz": 1.98e9,
        "gpu.0.memory_clock_hz": 2.619e9,
        "gpu.0.utilization": 0.9,
        "gpu.0.memory_utilization": 0.35,
        "gpu.0.memory_used_bytes": 30e9,
        "gpu.0.temperature_c": 61,
        "gpu.0.memory_temperature_c": 73,
        "gpu.0.clock_reasons": 4,
        "gpu.0.pcie_received_bytes_per_s": 3.4e6,
        "gpu.0.pcie_sent_bytes_per_s": 1.2e6,
        "gpu.0.pcie_replays": 7,
        "gpu.0.ecc_corrected": 3,
        "gpu.0.ecc_uncorrected": 0,
        # Links 0 and 2 of four are up; KiB each.
        "gpu.0.nvlink_received_bytes": (2000 + 2002) * 1024,
        "gpu.0.nvlink_sent_bytes": (1000 + 1002) * 1024,
        "gpu.0.nvlink_replays": 11,
    }
    assert read["gpu.1.power_w"] == 260
    assert read["gpu.1.memory_used_bytes"] == 30e9 + 1
    assert told["failures"] == [[]]
    assert all(math.isnan(value) for value in told["closed"])


@needs_library
def test_facts_tell_which_gpu_is_which(library: Path) -> None:
    facts = ask(library, reads=(), name='"Made"\n\x1b[31mGPU')["facts"]
    assert facts["gpu.driver"] == "550.54.15"
    assert facts["gpu.count"] == "2"
    assert facts["gpu.1.uuid"] == "GPU-00000001-0000-0000-0000-000000000000"
    assert facts["gpu.1.pci_bus_id"] == "00000000:11:00.0"
    assert facts["gpu.1.index"] == "1"
    assert facts["gpu.1.power_limit_w"] == "700"
    assert facts["gpu.1.sm_clock_max_hz"] == "1980000000"
    assert facts["gpu.1.memory_total_bytes"] == "80000000000"
    assert facts["gpu.1.mig"] == "not supported"
    assert facts["gpu.0.name"] == '"Made"__[31mGPU'
    assert "whole board" in facts["gpu.about.power_w"]
    assert "whole board" in facts["gpu.about.energy_j"]


@needs_library
def test_the_fast_tier_leaves_the_dear_calls_alone(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    told = ask(library, reads=(False,) * 5, gpus=1, log=log)
    calls = Counter(line.split()[0] for line in log.read_text().splitlines() if not line.startswith("field"))
    assert calls["nvmlDeviceGetPowerUsage"] == 6  # once to see whether it answers
    assert calls["nvmlDeviceGetPcieThroughput"] == 2
    assert calls["nvmlDeviceGetTemperatureV"] == 1
    slow = {name for name, _, is_slow in told["fields"] if is_slow}
    assert {name for name, value in values(told).items() if math.isnan(value)} == slow
    assert "gpu.0.pcie_sent_bytes_per_s" in slow
    assert "gpu.0.power_w" not in slow
    # In a slow reading every fast call comes before the first dear one.
    log.unlink()
    ask(library, reads=(True,), gpus=2, log=log)
    last = log.read_text().splitlines()
    dear = next(n for n in reversed(range(len(last))) if last[n].startswith("nvmlDeviceGetPowerUsage 1"))
    assert not any("PcieThroughput" in line for line in last[dear - 8 : dear])
    assert any("PcieThroughput" in line for line in last[dear:])


@needs_library
def test_what_is_not_supported_is_unavailable_in_nvmls_words_and_never_zero(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    told = ask(
        library,
        reads=(True, True),
        log=log,
        unsupported="nvmlDeviceGetTotalEnergyConsumption@1,nvmlDeviceGetPcieThroughput,nvmlDeviceGetUtilizationRates@0",
        fields_unsupported="82,91",
    )
    missing = told["unavailable"]
    assert set(missing) == {
        "gpu.1.energy_j",
        *(f"gpu.{gpu}.pcie_{way}_bytes_per_s" for gpu in (0, 1) for way in ("received", "sent")),
        *("gpu.0.utilization", "gpu.0.memory_utilization"),
        *(f"gpu.{gpu}.memory_temperature_c" for gpu in (0, 1)),
        *(f"gpu.{gpu}.nvlink_{way}_bytes" for gpu in (0, 1) for way in ("received", "sent")),
    }
    assert set(missing.values()) == {"Not Supported"}
    assert not set(missing) & set(values(told))
    assert values(told)["gpu.0.energy_j"] >= 1000
    assert values(told, 1)["gpu.0.nvlink_replays"] == 11
    lines = log.read_text().splitlines()
    assert lines.count("nvmlDeviceGetTotalEnergyConsumption 1") == 1  # probed once, not again
    assert lines.count("nvmlDeviceGetPcieThroughput 0") == 2
    assert lines.count("field 82:0 0") == 1


@needs_library
def test_a_field_that_fails_half_way_ends_once_and_is_not_called_again(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    told = ask(
        library,
        reads=(False,) * 6,
        gpus=2,
        log=log,
        fail_after="nvmlDeviceGetPowerUsage=3:10,nvmlDeviceGetMemoryInfo_v2=5:27",
    )
    powers = [values(told, n)["gpu.0.power_w"] for n in range(6)]
    assert powers[:2] == [250, 250]
    assert all(math.isnan(power) for power in powers[2:])
    assert told["failures"][2] == [["gpu.0.power_w", "Timeout"], ["gpu.1.power_w", "Timeout"]]
    # A code that nvidia-ml-py has no words for: the library is asked.
    words = [reason for failures in told["failures"] for name, reason in failures if name == "gpu.0.memory_used_bytes"]
    assert words == ["Not ready, says the made NVML"]
    assert sum(len(failures) for failures in told["failures"]) == 4
    assert values(told, 5)["gpu.0.utilization"] == 0.9
    assert Counter(log.read_text().splitlines())["nvmlDeviceGetPowerUsage 0"] == 4


@needs_library
def test_a_gpu_that_falls_off_the_bus_ends_with_all_its_fields(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    told = ask(library, reads=(False, True, False, True, True), log=log, lost="1=60")
    of_lost = {name for name, _, _ in told["fields"] if name.startswith("gpu.1.")}
    failures = [failure for failures in told["failures"] for failure in failures]
    assert len(of_lost) == 27
    assert {name for name, _ in failures} == of_lost
    assert len(failures) == len(of_lost)
    assert {reason for _, reason in failures} == {"GPU is lost"}
    last = values(told, 4)
    assert all(math.isnan(last[name]) for name in of_lost)
    assert all(math.isfinite(value) for name, value in last.items() if name not in of_lost)
    assert calls_to(log, 1) == 61


def calls_to(log: Path, device: int) -> int:
    return len([line for line in log.read_text().splitlines() if re.fullmatch(rf"nvml\w+ {device}", line)])


@needs_library
def test_mig(library: Path) -> None:
    told = ask(library, mig=0)
    read = values(told)
    assert read["gpu.0.mig.0.memory_used_bytes"] == 5e9
    assert read["gpu.0.mig.2.memory_used_bytes"] == 5e9 + 2
    assert read["gpu.0.power_w"] == 250
    refused = ("utilization", "memory_utilization", *GPM)
    assert told["unavailable"] == {f"gpu.0.{name}": "Not Supported (the GPU is in MIG mode)" for name in refused}
    assert told["facts"]["gpu.0.mig"] == "on"
    assert told["facts"]["gpu.1.mig"] == "off"
    assert told["facts"]["gpu.0.mig.2.uuid"] == "MIG-00000000-0000-0000-0000-000000000002"
    # An empty place is no instance that fails.
    told = ask(library, mig=0, fail_after="nvmlDeviceGetMigDeviceHandleByIndex=2:4")
    reason = "Insufficient Permissions (the GPU is in MIG mode)"
    assert {k: v for k, v in told["unavailable"].items() if ".mig." in k} == {"gpu.0.mig.2.memory_used_bytes": reason}
    # No power, energy or anything else of the board is given to an instance.
    ends = {name.split(".", 4)[-1] for name in read if ".mig." in name}
    assert ends == {"memory_used_bytes"}


@needs_library
def test_gpm_is_read_between_two_samples_and_given_back(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    told = ask(library, reads=(False, True, True), log=log, gpm_refused=60)
    assert told["unavailable"] == {f"gpu.{gpu}.nvlink_received_bytes_per_s": "Not Supported" for gpu in (0, 1)}
    assert math.isnan(values(told)["gpu.1.sm_active"])  # dear, so of the slow tier
    for number in (1, 2):
        assert values(told, number)["gpu.1.tensor_active"] == pytest.approx(0.15)
    assert told["failures"] == [[]] * 3
    calls = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert calls["nvmlGpmSampleAlloc"] == calls["nvmlGpmSampleFree"] == 4
    assert calls["nvmlGpmSampleGet"] == 2 * (2 + 2)


@needs_library
def test_an_old_driver_without_newer_functions(tmp_path: Path) -> None:
    folder = build(
        tmp_path,
        missing=(
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetTemperatureV",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetMigMode",
        ),
    )
    told = ask(folder, reads=(True, True), gpus=1)
    for number in range(2):
        read = values(told, number)
        assert read["gpu.0.memory_used_bytes"] == 30.6e9  # the first version counts the reserve in
        assert read["gpu.0.clock_reasons"] == 4
        assert read["gpu.0.temperature_c"] == 61
    assert set(told["unavailable"]) == {
        f"gpu.0.{name}"
        for name in ("memory_temperature_c", "nvlink_replays", "nvlink_received_bytes", "nvlink_sent_bytes")
    }
    assert set(told["unavailable"].values()) == {"Function Not Found"}
    assert told["facts"]["gpu.0.mig"] == "unknown: Function Not Found"


@needs_library
@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        ({"init": 9}, "Driver Not Loaded"),
        ({"init": 18}, "RM has detected an NVML/RM version mismatch; NVIDIA's driver was updated and the kernel"),
        ({"gpus": 0}, "NVML finds no GPU"),
    ],
)
def test_without_a_driver_or_a_gpu(library: Path, switches: dict[str, int], reason: str) -> None:
    told = ask(library, **switches)
    assert told["unavailable"].keys() == {"gpu"}
    assert told["unavailable"]["gpu"].startswith(reason)
    assert told["fields"] == []
    assert told["reads"] == [[]]


def test_without_the_package(tmp_path: Path) -> None:
    code = "import sys\nsys.modules['pynvml'] = None\n" + READER
    assert ask(tmp_path, code=code)["unavailable"] == {"gpu": "the package nvidia-ml-py is not installed"}


@needs_library
def test_nothing_is_ever_set(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    ask(library, reads=(False, True, True), log=log, mig=1, fail_after="nvmlDeviceGetPowerUsage=3:10", lost="1=60")
    lines = log.read_text().splitlines()
    names = {line.split()[0] for line in lines if not line.startswith("field ")}
    assert len(names) > 15
    reads = r"nvml(InitWithFlags$|Shutdown$|SystemGet|DeviceGet|Gpm(Query|Sample|MetricsGet))"
    assert [name for name in names if not re.match(reads, name)] == []
    assert lines.count("nvmlInitWithFlags") == lines.count("nvmlShutdown") == 1
    # A setter that is called does leave its mark.
    setter = "import pynvml\npynvml.nvmlInit()\nhandle = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
    ask(library, code=setter + "pynvml.nvmlDeviceSetPersistenceMode(handle, 1)\nprint('{}')", log=log)
    assert "SET nvmlDeviceSetPersistenceMode" in log.read_text().splitlines()


def test_bits_are_nvmls_own() -> None:
    import pynvml

    for reason in CLOCK_REASONS:
        name = "nvmlClocksThrottleReason" + "".join(part.capitalize() for part in reason.name.split("_"))
        assert getattr(pynvml, name, reason.bit) == reason.bit
    known = [name for name in vars(pynvml) if re.match(r"nvmlClocks(Event|Throttle)Reason(?!s)(?!All|None)", name)]
    assert len(known) > 8
    assert {getattr(pynvml, name) for name in known} <= {reason.bit for reason in CLOCK_REASONS}
