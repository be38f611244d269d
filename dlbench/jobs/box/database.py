"""Accounting of a box, as text: its MariaDB, its slurmdbd, and the accounts, QOS and users that it begins with.

slurmdbd keeps its books in MySQL or MariaDB only. The server here has a socket in the box's folder and no network; only
root reaches the socket, so that rights need no checks. Its files are in memory that only its own mounts show: on a
disk, slurmdbd's tables alone took 8 s, and nothing is left of it once it ends.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dlbench.jobs.box.config import CONTROLLER_HOST, BoxPlan, in_own_mounts
from dlbench.jobs.scripts.job import render

_MOST_MIB = 512
"""Of the database; the books of a hundred jobs are 20 MiB, most of it empty tables."""


def folder(plan: BoxPlan) -> Path:
    """Where the database lies; others have no way into it."""
    return plan.folder / "db"


def socket(plan: BoxPlan) -> Path:
    """Where MariaDB answers."""
    return folder(plan) / "socket"


def mariadbd_argv(plan: BoxPlan) -> list[str]:
    """The command line of the database server, which makes its own tables first."""
    data = folder(plan) / "data"
    command = [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={data}",
        f"--tmpdir={data}",
        f"--socket={socket(plan)}",
        f"--pid-file={folder(plan) / 'pid'}",
        "--skip-networking",
        "--skip-grant-tables",
        "--skip-log-bin",
        "--performance-schema=OFF",
        "--max-connections=50",
        "--innodb-buffer-pool-size=16M",
        "--innodb-log-file-size=4M",
    ]
    steps = [
        f"mkdir {shlex.quote(str(data))}",
        f"mount -t tmpfs -o mode=0700,size={_MOST_MIB}m tmpfs {shlex.quote(str(data))}",
        f"mkdir {shlex.quote(str(data / 'mysql'))}",
        # slurmdbd has procedures of its own, which are kept in a table of the system.
        "for share in /usr/share/mysql /usr/share/mariadb; do [ -f $share/mysql_system_tables.sql ] && break; done",
        f"{{ echo 'USE mysql;'; cat $share/mysql_system_tables.sql; }} | {shlex.join(command)} --bootstrap",
        f"exec {shlex.join(command)}",
    ]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(steps)]


def slurmdbd_argv(plan: BoxPlan) -> list[str]:
    """The command line of slurmdbd; its configuration is found beside slurm.conf."""
    command = ["env", f"SLURM_CONF={plan.conf}", f"MYSQL_UNIX_PORT={socket(plan)}", "slurmdbd", "-D"]
    return in_own_mounts(plan, CONTROLLER_HOST, command)


def render_slurmdbd_conf(plan: BoxPlan) -> str:
    """The text of slurmdbd.conf, which only its owner may read, or slurmdbd refuses it."""
    return render("box/slurmdbd.conf.j2", plan=plan, controller_host=CONTROLLER_HOST)


def first_entries(plan: BoxPlan) -> list[list[str]]:
    """The commands that write the cluster, its QOS, accounts and users into the empty database."""
    has = plan.equipment
    accounts, users = has.account_names, has.user_names
    commands = [["add", "cluster", f"box{plan.token}"]]
    names = [line.split()[0] for line in has.qos]
    # All names first: a QOS may preempt one that comes later.
    if new := [name for name in names if name != "normal"]:
        commands.append(["add", "qos", ",".join(new)])
    for line in has.qos:
        name, *words = line.split()
        if words:
            commands.append(["modify", "qos", name, "set", *words])
    everything = f"qos={','.join(dict.fromkeys(['normal', *names]))}"
    for account in accounts:
        commands.append(["add", "account", account, everything])
        commands.append(["add", "user", ",".join(users), f"account={account}"])
    # root has an account of its own from the start, with the usual QOS only.
    commands.append(["modify", "user", "root", "set", f"DefaultAccount={accounts[0]}", everything])
    return [["sacctmgr", "--immediate", "--quiet", *command] for command in commands]
