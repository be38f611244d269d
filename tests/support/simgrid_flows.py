"""Runs under the system's Python, which has SimGrid: cases from standard input as JSON, their times as JSON.

A case has `hosts` (how many), `seconds_per_byte` and `hop_s` of every link, and `steps`: lists of messages, each
[source, target, bytes, links]. A step begins when the one before has ended; flows share links by max-min fairness.
"""

import json
import sys

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, NetZone

# Plain latency + size / rate, without the factors that SimGrid fits to TCP.
PLAIN = ("network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0", "network/weight-S:0")
PLAIN += ("network/latency-factor:1", "network/bandwidth-factor:1")


def main() -> None:
    cases, times = json.load(sys.stdin), []
    engine = Engine(["simgrid", "--log=root.thres:critical", *(f"--cfg={one}" for one in PLAIN)])
    zone = NetZone.create_full_zone("all")
    for number, case in enumerate(cases):
        hosts = [zone.create_host(f"{number}-{host}", 1e9) for host in range(case["hosts"])]
        links = {}
        for source, target, path in {(one[0], one[1], tuple(one[3])) for step in case["steps"] for one in step}:
            for name in path:
                if name not in links:
                    links[name] = zone.create_link(f"{number}-{name}", 1 / case["seconds_per_byte"])
                    links[name].set_latency(case["hop_s"]).seal()
            ends = (hosts[source].netpoint, hosts[target].netpoint, None, None)
            zone.add_route(*ends, [LinkInRoute(links[name]) for name in path], False)
    zone.seal()

    def run() -> None:
        for number, case in enumerate(cases):
            began = Engine.clock
            for step in case["steps"]:
                flows = []
                for source, target, size, _ in step:
                    ends = (Host.by_name(f"{number}-{host}") for host in (source, target))
                    flows.append(Comm.sendto_async(*ends, size))
                Comm.wait_all(flows)
            times.append(Engine.clock - began)

    Actor.create("run", Host.by_name("0-0"), run)
    engine.run()
    print(json.dumps(times))


main()
