#!/usr/bin/env python3
"""Compares the time to good partitions of `dflop balance`, OR-tools CP-SAT and HiGHS, in one run.

All get the same instance files and solve the same problem: `x[i][j]` binary, every item in one group, the largest sum of
a module in a group minimized. The solvers get that model unchanged, a time limit and a number of threads; dflop runs on
one thread, with doubling work units and no clock. Every answer is summed up again here, in integers, and every gap is
relative to the same bound, the one that dflop certifies. Times are of this machine: `seconds` of day, `cpu_seconds` of the
process; those of dflop leave out reading the file, those of the solvers building the model.

Needs Python 3.11, and `pip install ortools highspy` for the solvers; a solver that is not installed is left out.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time


def read_instance(path):
    opened = gzip.open if open(path, "rb").read(2) == b"\x1f\x8b" else open
    with opened(path, "rt") as file:
        return json.load(file)


def makespan(instance, groups):
    """Summarizes an answer; checks that every item is in exactly one group, and no group is empty."""
    assert sorted(item for group in groups for item in group) == list(range(instance["n"]))
    assert len(groups) == instance["m"] and all(groups)
    return max(sum(instance["d"][item][module] for item in group) for group in groups for module in range(instance["c"]))


def run_dflop(binary, path, instance, work, repeats):
    """Returns the answer of a work budget; times are the shortest of some runs, answers are always the same."""
    runs = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run([binary, "balance", "--instance", path, "--search-effort", str(work), "--json"],
                             check=True, stdout=subprocess.PIPE).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        runs.append((json.loads(out), cpu_seconds))
    report = runs[0][0]
    assert all(run["groups"] == report["groups"] for run, _ in runs), "the same work gave another answer"
    assert report["makespan_ns"] == makespan(instance, report["groups"])
    return {
        "work": work,
        "work_spent": report["work_spent"],
        "seconds": min(run["solve_ms"] for run, _ in runs) / 1e3,
        "process_cpu_seconds": min(cpu_seconds for _, cpu_seconds in runs),
        "makespan_ns": report["makespan_ns"],
        "lower_bound_ns": report["lower_bound_ns"],
        "bound": report["bound"],
    }


def run_cp_sat(instance, seconds, threads):
    from ortools.sat.python import cp_model

    items, groups, modules = range(instance["n"]), range(instance["m"]), range(instance["c"])
    model = cp_model.CpModel()
    x = [[model.new_bool_var("") for _ in groups] for _ in items]
    total = max(sum(row[module] for row in instance["d"]) for module in modules)
    longest = model.new_int_var(0, total, "")
    for i in items:
        model.add_exactly_one(x[i])
    for j in groups:
        for module in modules:
            model.add(sum(instance["d"][i][module] * x[i][j] for i in items) <= longest)
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = threads

    class Improvements(cp_model.CpSolverSolutionCallback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_solution_callback(self):
            self.seen.append({"seconds": self.wall_time, "makespan_ns": int(self.objective_value)})

    improvements = Improvements()
    clock, cpu = time.perf_counter(), time.process_time()
    status = solver.solve(model, improvements)
    report = {"status": solver.status_name(status), "seconds": time.perf_counter() - clock,
              "cpu_seconds": time.process_time() - cpu, "improvements": improvements.seen}
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        report["makespan_ns"] = answer(instance, [[solver.value(v) for v in row] for row in x])
    return report


def run_highs(instance, seconds, threads):
    import highspy
    import numpy

    n, m, c = instance["n"], instance["m"], instance["c"]
    lp = highspy.HighsLp()
    # Columns: x[i][j] at i * m + j, then the makespan, in milliseconds. Rows: items, then modules of groups.
    starts, rows, values = [], [], []
    for i in range(n):
        for j in range(m):
            starts.append(len(rows))
            rows += [i, *(n + j * c + k for k in range(c))]
            values += [1.0, *(instance["d"][i][k] / 1e6 for k in range(c))]
    starts.append(len(rows))
    rows += range(n, n + m * c)
    values += [-1.0] * (m * c)
    lp.num_col_, lp.num_row_ = n * m + 1, n + m * c
    lp.col_cost_ = numpy.array([0.0] * (n * m) + [1.0])
    lp.col_lower_ = numpy.zeros(n * m + 1)
    lp.col_upper_ = numpy.array([1.0] * (n * m) + [highspy.kHighsInf])
    lp.row_lower_ = numpy.array([1.0] * n + [-highspy.kHighsInf] * (m * c))
    lp.row_upper_ = numpy.array([1.0] * n + [0.0] * (m * c))
    lp.integrality_ = [highspy.HighsVarType.kInteger] * (n * m) + [highspy.HighsVarType.kContinuous]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = numpy.array([*starts, len(rows)])
    lp.a_matrix_.index_ = numpy.array(rows)
    lp.a_matrix_.value_ = numpy.array(values)
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("time_limit", float(seconds))
    solver.setOptionValue("threads", threads)
    solver.passModel(lp)
    clock, cpu = time.perf_counter(), time.process_time()
    solver.run()
    report = {"status": solver.modelStatusToString(solver.getModelStatus()),
              "seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu}
    if solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        column = solver.getSolution().col_value
        report["makespan_ns"] = answer(instance, [column[i * m : (i + 1) * m] for i in range(n)])
    return report


def answer(instance, rows):
    """Returns the makespan of 0/1 values; the solvers' model allows empty groups, so they are allowed here."""
    loads = [[0] * instance["c"] for _ in range(instance["m"])]
    for item, row in enumerate(rows):
        group = max(range(len(row)), key=row.__getitem__)
        for module, ns in enumerate(instance["d"][item]):
            loads[group][module] += ns
    return max(map(max, loads))


def apart(run, *args):
    """Runs a solver in its own process: both load a HiGHS library, and one would hide the other's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, args)


def compared(ladder, peer):
    """Returns how much sooner dflop had an answer at least as good."""
    if "makespan_ns" not in peer:
        return None
    as_good = [step["seconds"] for step in ladder if step["makespan_ns"] <= peer["makespan_ns"]]
    return peer["seconds"] / min(as_good) if as_good else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", nargs="+", help="instance files, as `dflop balance` reads them")
    parser.add_argument("--dflop", default="target/dist/dflop", help="the binary")
    parser.add_argument("--search-effort", type=int, nargs="+", default=[0, 2_000, 20_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3, help="runs of dflop, of which the shortest counts")
    parser.add_argument("--seconds", type=float, default=10, help="time limit of the solvers")
    parser.add_argument("--threads", type=int, default=2, help="threads of the solvers")
    parser.add_argument("--out", help="JSON file for the raw figures")
    arguments = parser.parse_args()
    results = []
    for path in arguments.instances:
        instance = read_instance(path)
        ladder = [run_dflop(arguments.dflop, path, instance, work, arguments.repeats) for work in arguments.search_effort]
        bound = max(step["lower_bound_ns"] for step in ladder)
        peers = {}
        for name, run in [("cp_sat", run_cp_sat), ("highs", run_highs)]:
            try:
                peers[name] = apart(run, instance, arguments.seconds, arguments.threads)
            except ModuleNotFoundError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
        for step in [*ladder, *peers.values()]:
            step["gap"] = step["makespan_ns"] / bound - 1 if "makespan_ns" in step else None
        sooner = {name: compared(ladder, peer) for name, peer in peers.items()}
        results.append({"name": instance["name"], "lower_bound_ns": bound, "dflop": ladder, **peers, "sooner": sooner})
        print(instance["name"])
        for step in ladder:
            print(f"  dflop {step['work']:>9} units {step['seconds'] * 1e3:>10.2f} ms  gap {step['gap']:>9.5%}")
        for name, peer in peers.items():
            gap = "no answer" if peer["gap"] is None else f"gap {peer['gap']:>9.5%}"
            ratio = "" if sooner[name] is None else f", as good {sooner[name]:,.0f} times sooner"
            print(f"  {name:<6} {peer['seconds'] * 1e3:>21.2f} ms  {gap} ({peer['status']}){ratio}")
    if arguments.out:
        report = {"threads": arguments.threads, "limit_seconds": arguments.seconds, "cores": os.cpu_count(), "results": results}
        with open(arguments.out, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
