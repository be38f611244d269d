"""What is captured of the machine around a run: nothing of it is worth the run, and no secret is written."""

from __future__ import annotations

import pytest
import torch

from dlbench.machine import environment
from dlbench.node.torch_facts import torch_facts


def recorded(variables: dict[str, str], *withheld: str) -> set[str]:
    prefix = "variable."
    return {
        key.removeprefix(prefix)
        for key in environment.capture([], variables, withheld=withheld)
        if key.startswith(prefix)
    }


def test_settings_of_the_libraries_are_recorded() -> None:
    settings = {
        "NCCL_IB_PKEY": "7",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "OMP_NUM_THREADS": "4",
        "OMPI_MCA_btl": "self,tcp",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "LD_PRELOAD": "/nix/store/0c6kzph7l0dcbfmjap64f0czdafn3b7x-jemalloc-5.3.0/lib/libjemalloc.so",
        "HOROVOD_FUSION_THRESHOLD": "134217728",
        "HOROVOD_TIMELINE": "/scratch/timeline.json",
        "OMPI_MCA_hwloc_base": "-p 8080 -pthread --mca compass:3 bypass=1",
    }
    assert recorded(settings) == set(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOME", "/root"),
        ("HOROVOD_TIMELINE", "DYNAMIC"),
        ("MY_SETTING", "1"),
        ("UCX_AUTH", "hunter2"),
        ("UCX_Authorization", "hunter2"),
        ("OMPI_MCA_x_bearer", "hunter2"),
        ("NCCL_TOKEN", "hunter2"),
        ("GLOO_API_KEY", "hunter2"),
        ("GLOO_PASS", "hunter2"),
        ("HOROVOD_SECRET", "hunter2"),
        ("GLOO_URL", "http://user:pass@h"),
        ("GLOO_URL", "tcp://user@h:1"),
        ("UCX_HEADER", "Authorization: Bearer abc"),
        ("OMPI_MCA_x", "password=hunter2"),
        ("OMPI_MCA_x", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln"),
        ("NCCL_X", "ghp_0123456789abcdefghij"),
        ("NCCL_X", "0123456789abcdef0123456789abcdef"),
        ("OMPI_MCA_btl_pw", "hunter2"),
        ("UCX_PW", "hunter2"),
        ("NCCL_AccountKey", "hunter2"),
        ("NCCL_X", "rk_live_51H8abcdEFGHijklMN"),
        ("NCCL_X", "sk_live_51H8abcdEFGH"),
        ("NCCL_X", "DefaultEndpointsProtocol=https;AccountKey=abcd+/==;EndpointSuffix=x"),
        ("NCCL_X", "-u root -phunter2 db"),
        ("NCCL_X", "pw=hunter2"),
        ("UCX_X", '{"user": "ann", "password": "hunter2"}'),
        ("UCX_X", '{"login": "{\\"api_key\\":\\"hunter2\\"}"}'),
        ("UCX_X", "{'token' : 'hunter2'}"),
    ],
)
def test_what_may_be_a_secret_or_says_nothing_is_not(name: str, value: str) -> None:
    assert recorded({name: value, "NCCL_DEBUG": "WARN"}) == {"NCCL_DEBUG"}


def test_what_the_plan_gives_by_reference_is_not() -> None:
    assert recorded({"NCCL_DEBUG": "WARN", "NCCL_X": "1"}, "NCCL_X") == {"NCCL_DEBUG"}


def test_a_fact_that_cannot_be_asked_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = environment.capture([], {})

    def fail() -> str:
        raise RuntimeError("the driver is out of order")

    monkeypatch.setitem(environment._SINGLE, "memory.bytes", fail)
    problems: list[str] = []
    facts = environment.capture(problems, {})
    assert facts == {key: value for key, value in whole.items() if key != "memory.bytes"}
    assert problems == ["environment: memory.bytes is not known: RuntimeError: the driver is out of order"]


def test_lists_of_folders_are_told_apart_and_not_written_down() -> None:
    one, other = (
        environment.capture([], {"LD_LIBRARY_PATH": path})["variable.LD_LIBRARY_PATH"]
        for path in ("/home/ann/secret/lib:/opt/lib", "/home/ann/other/lib:/opt/lib")
    )
    assert one != other
    assert one.startswith("2 folders, SHA-256 ")
    assert "ann" not in one


def test_switches_of_torch_are_recorded_for_the_device_on_which_they_act() -> None:
    problems: list[str] = []
    cpu = torch_facts(problems, torch.device("cpu"))
    assert cpu["torch.cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    gpu = torch_facts(problems, torch.device("cuda", 0))
    assert {"torch.tf32.matmul", "torch.tf32.cudnn", "torch.cudnn.benchmark", "torch.sdpa"} <= gpu.keys() - cpu.keys()
    torch.backends.cuda.enable_math_sdp(False)
    try:
        assert "math" not in torch_facts(problems, torch.device("cuda", 0))["torch.sdpa"]
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    assert problems == []
