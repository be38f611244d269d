"""ReFrame tests that call dlbench: one that measures scaling, one that gates against a baseline.

    reframe -C settings.py -c dlbench_check.py -n DlbenchScaling -r
    reframe -C settings.py -c dlbench_check.py -n DlbenchGate -S baseline=$PWD/baseline.json -r

dlbench starts the ranks itself, so ReFrame starts one process. On a cluster, give the site's settings (-C) and a system
file of dlbench (-S system=my-cluster.yaml), and ask for nodes with -S nodes=2. The job asks for the tasks, cores and
GPUs that the system file names, and dlbench uses the allocation it is in. GPUs are asked for through the resource `gpu`
of the partition's settings (settings.py shows one), everything else of the site through its `access`.

Without reference values DlbenchScaling only records its figures. A site gives its own in a JSON file, by ReFrame's
system and partition, then by workload and ranks: value, lower and upper bound as shares of it (null: none), unit.

    {"my-cluster:gpu": {"resnet50 1,8": {"throughput": [5150, -0.05, null, "samples/s"],
                                         "efficiency": [94, -0.05, null, "%"]}}}

    reframe ... -n DlbenchScaling -S references=$PWD/references.json -r

Take values from several runs of a machine in good order, and bounds no narrower than their scatter there.
"""

import json
import subprocess
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.backends import getlauncher
from reframe.core.builtins import deferrable, parameter, performance_function, run_before, sanity_function, variable


class DlbenchTest(rfm.RunOnlyRegressionTest):
    """What both tests share: how dlbench is called."""

    # ReFrame makes every test's own copy of what stands in a class.
    valid_systems = ["*"]  # noqa: RUF012
    valid_prog_environs = ["*"]  # noqa: RUF012

    dlbench = variable(str, value="dlbench")
    # What is measured: gpu trains as published tables of GPUs do (bf16, their batch sizes). Without GPUs: full, in
    # strict fp32. ci is for trying these checks on any machine (-S preset=ci): its figures say nothing about a cluster
    preset = variable(str, value="gpu")
    engine = variable(str, value="ddp")
    data = variable(str, value="synthetic")
    system = variable(str, value="local")
    nodes = variable(int, value=1)
    # Rank counts, e.g. 8,16; empty: 1,2 on one node, else all ranks of one node, and of all nodes
    ranks = variable(str, value="")
    # Changes of the plan, KEY=VALUE with commas between them, e.g. measure.measured_steps=50
    settings = variable(str, value="")
    repeats = variable(int, value=5)
    # Rank counts in force
    rank_counts = variable(str, value="")
    time_limit = "2h"

    @run_before("setup")
    def ask_for_what_it_uses(self):
        """Tasks, cores and GPUs of the nodes, as the system file has them."""
        shown = subprocess.run([self.dlbench, "show", self.system, "--json"], stdout=subprocess.PIPE, check=True)
        system = json.loads(shown.stdout)
        node = system["node"]
        per_node = node["ranks"] or node["gpus"] or 1
        self.rank_counts = self.ranks or ("1,2" if self.nodes == 1 else f"{per_node},{self.nodes * per_node}")
        if system["scheduler"] == "none":
            return
        self.num_tasks = self.nodes * per_node
        self.num_tasks_per_node = per_node
        self.num_cpus_per_task = max(1, node["cores"] // per_node)
        self.exclusive_access = system["slurm"]["exclusive"]
        if node["gpus"]:
            self.extra_resources = {"gpu": {"num_gpus_per_node": node["gpus"]}}

    @run_before("run")
    def start_dlbench_itself(self):
        """The ranks are dlbench's business: ReFrame's launcher would start it once a rank."""
        self.job.launcher = getlauncher("local")()

    def run_options(self, workload, ranks):
        """Arguments of `dlbench run`."""
        changes = [option for change in self.settings.split(",") if change for option in ("--set", change)]
        return [
            *("run", workload, "--preset", self.preset, "--engine", self.engine, "--data", self.data),
            *("--ranks", ranks, "--system", self.system, "--repeats", str(self.repeats)),
            *("--out", "runs", "--no-progress", *changes),
        ]

    @deferrable
    def read(self, name):
        """A JSON file that dlbench wrote."""
        return json.loads((Path(self.stagedir) / name).read_text(encoding="utf-8"))


@rfm.simple_test
class DlbenchScaling(DlbenchTest):
    """One workload at two rank counts: throughput, step time, and what of the efficiency is kept."""

    descr = "dlbench: scaling of one workload"
    workload = parameter(["resnet50", "bert", "cosmoflow"])
    # A JSON file with the site's reference values, as above
    references = variable(str, value="")

    @run_before("run")
    def call(self):
        """Measure, then write the figures where ReFrame reads them."""
        self.executable = self.dlbench
        self.executable_opts = self.run_options(self.workload, self.rank_counts)
        self.postrun_cmds = [f"{self.dlbench} report runs --format json -o report.json"]

    @sanity_function
    def every_run_is_valid(self):
        """Exit code 0 (no run failed, nothing is damaged), and every run passed dlbench's own sanity checks."""
        report = self.read("report.json")
        wanted = self.repeats * len(self.rank_counts.split(","))
        states = sn.map(lambda run: run["state"], report["runs"])
        return sn.all(
            [
                sn.assert_eq(self.job.exitcode, 0),
                sn.assert_eq(sn.len(report["runs"]), wanted),
                sn.assert_true(sn.all(sn.map(lambda state: state == "valid", states)), msg="a run is not valid"),
            ]
        )

    @deferrable
    def point(self, index):
        """A scaling point, ascending by ranks; each figure in it is an object with value, unit, low, high, n."""
        return self.read("report.json").evaluate()["groups"][0]["points"][index]

    @run_before("performance")
    def take_references(self):
        """The site's values for this machine, workload and ranks; a file that lacks them is an error."""
        if self.references:
            place, case = self.current_partition.fullname, f"{self.workload} {self.rank_counts}"
            found = json.loads(Path(self.references).read_text(encoding="utf-8")).get(place, {}).get(case)
            if not found:
                raise ValueError(f"{self.references} has no values for {case!r} on {place!r}")
            self.reference = {place: {name: tuple(values) for name, values in found.items()}}

    @performance_function("samples/s")
    def throughput(self):
        """At most ranks; median over runs. A sample is an image, a sequence or a volume."""
        return self.point(-1)["throughput"]["value"]

    @performance_function("%")
    def efficiency(self):
        """At most ranks, against the fewest."""
        return self.point(-1)["efficiency"]["value"] * 100

    @performance_function("ms")
    def step_time(self):
        """At most ranks; median over runs of the median step."""
        return self.point(-1)["step"]["value"] * 1000


@rfm.simple_test
class DlbenchGate(DlbenchTest):
    """Fails if the machine is slower than the baseline, beyond chance and tolerance."""

    descr = "dlbench: gate against a baseline"
    # Written by `dlbench baseline RUNS -o baseline.json` from runs of the same workload, preset, engine and ranks, of
    # five nights or more: what one night differs from another by does not show in fewer.
    baseline = variable(str, value="")
    workload = variable(str, value="resnet50")

    @run_before("run")
    def call(self):
        """Measure, then ask dlbench for the verdict."""
        self.skip_if(not self.baseline, "no baseline was given: -S DlbenchGate.baseline=FILE")
        self.executable = self.dlbench
        self.executable_opts = self.run_options(self.workload, self.rank_counts)
        # The exit code of the job is that of its last command: 0, 1 (slower) or 6 (cannot say).
        self.postrun_cmds = [
            f"{self.dlbench} check --baseline {self.baseline} --candidate runs --json check.json --junit junit.xml"
        ]
        self.keep_files = ["check.json", "junit.xml"]

    @sanity_function
    def not_slower(self):
        """Inconclusive is not a pass: raise `repeats` until dlbench can say."""
        return sn.assert_eq(self.job.exitcode, 0, msg="dlbench check ended with {0}: 1 is slower, 6 cannot say")
