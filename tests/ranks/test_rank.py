"""srun's variables under torch's names, and the steps that are refused."""

import re

import pytest

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.rank import adopt_srun, check_launch, first_host, rank_variables


def adopted(others: dict[str, str] | None = None, **step: str) -> dict[str, str]:
    """Return what a rank's environment becomes: rank 3 of 2 nodes with 2 tasks each, but for `step`. `others`:
    variables that do not begin with SLURM_."""
    usual = {
        "JOB_ID": "1",
        "STEP_ID": "0",
        "STEP_NUM_TASKS": "4",
        "STEP_NUM_NODES": "2",
        "STEP_TASKS_PER_NODE": "2(x2)",
        "STEP_NODELIST": "n[1-2]",
        "PROCID": "3",
        "LOCALID": "1",
        "NODEID": "1",
        "GTIDS": "2,3",
    }
    environment = {f"SLURM_{name}": value for name, value in (usual | step).items()} | (others or {})
    adopt_srun(environment)
    return environment


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpu[003-004,012],login", "gpu003"),
        ("node7", "node7"),
        ("a-1,a-2", "a-1"),
        ("rack[2-3]-n[09-10]", "rack2-n09"),
        ("x[5],y", "x5"),
    ],
)
def test_the_first_of_a_list_of_nodes_is_read(text, name):
    assert first_host(text) == name


def test_the_rendezvous_is_on_the_first_node():
    environment = adopted()
    assert [environment[name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")] == ["3", "1", "1", "4"]
    assert environment["MASTER_ADDR"] == "n1"


@pytest.mark.parametrize("job", [1, 387, 12345, 4294901759])
def test_the_port_is_not_one_that_linux_gives_to_programs_that_ask_for_any(job):
    ports = [int(adopted(JOB_ID=str(job), STEP_ID=str(step))["MASTER_PORT"]) for step in range(400)]
    assert min(ports) >= 20000 and max(ports) < 32000 and len(set(ports)) == 400


def test_a_batch_script_is_not_taken_for_a_task():
    environment = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    adopt_srun(environment)
    assert "RANK" not in environment


def test_nodes_with_different_numbers_of_tasks_are_refused():
    with pytest.raises(ConfigError, match="srun: nodes have 8, 8, 4 tasks; every node must have the same number"):
        adopted(STEP_NUM_TASKS="20", STEP_NUM_NODES="3", STEP_TASKS_PER_NODE="8(x2),4")


@pytest.mark.parametrize(
    ("step", "has"),
    [
        ({"PROCID": "3", "LOCALID": "1", "NODEID": "1", "GTIDS": "1,3"}, "node 1 has the ranks 1, 3, expected 2, 3"),
        ({"PROCID": "0", "LOCALID": "0", "NODEID": "0", "GTIDS": "0,2"}, "node 0 has the ranks 0, 2, expected 0, 1"),
        ({"PROCID": "0", "LOCALID": "0", "NODEID": "1", "GTIDS": "0,1"}, "node 1 has the ranks 0, 1, expected 2, 3"),
        ({"PROCID": "2", "LOCALID": "1", "NODEID": "0", "GTIDS": ""}, "node 0 has the ranks 2, expected 0, 1"),
    ],
    ids=["cyclic", "cyclic, rank 0", "arbitrary", "cyclic, no list"],
)
def test_nodes_whose_ranks_do_not_follow_each_other_are_refused(step, has):
    """Every rank of the node refuses, though rank 0 of a cyclic step has the right rank."""
    with pytest.raises(ConfigError) as error:
        adopted(**step)
    assert str(error.value) == (
        f"srun: {has}; give each node consecutive ranks, in the order of the nodes (--distribution=block)"
    )


def test_rank_0_refuses_an_address_that_is_not_its_own_and_keeps_one_that_was_given():
    place, here = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "GTIDS": "0,1"}, {"SLURMD_NODENAME": "n2"}
    with pytest.raises(ConfigError, match=r"srun: rank 0 is on n2, and n1 is the first of .*; set MASTER_ADDR=n2"):
        adopted(here, **place)
    assert adopted(here | {"MASTER_ADDR": "10.0.0.2"}, **place)["MASTER_ADDR"] == "10.0.0.2"


def test_ranks_are_numbered_node_after_node():
    names = ("RANK", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [rank_variables(6, 8, 4)[name] for name in names] == ["6", "8", "1", "2", "4"]
    assert [rank_variables(6, 8)[name] for name in names] == ["6", "8", "0", "6", "8"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE is 2, and RANK is not set; unset WORLD_SIZE, or start 2 ranks"),
        ("RANK=1", "RANK is 1, and WORLD_SIZE is not set; unset RANK, or set WORLD_SIZE"),
        ("RANK=2 WORLD_SIZE=2", "RANK is 2, and WORLD_SIZE is 2; "),
        ("RANK=x WORLD_SIZE=2", "RANK: 'x' given, expected a whole number; "),
        ("RANK=0 WORLD_SIZE=", "WORLD_SIZE: '' given, expected a whole number; "),
        ("LOCAL_WORLD_SIZE=2", "LOCAL_WORLD_SIZE is 2, and WORLD_SIZE is not set; unset LOCAL_WORLD_SIZE, "),
        ("LOCAL_RANK=1", "LOCAL_RANK is 1, and LOCAL_WORLD_SIZE is not set; unset LOCAL_RANK, "),
        ("RANK=0 WORLD_SIZE=2", "WORLD_SIZE is 2, and MASTER_ADDR is not set; set MASTER_ADDR to that of rank 0"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1", "WORLD_SIZE is 2, and MASTER_PORT is not set; "),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_PORT=http", "MASTER_PORT: 'http' given, expected a free port "),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_PORT=65536", "MASTER_PORT: '65536' given, "),
    ],
)
def test_variables_that_make_no_launch_are_named(variables, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        check_launch(dict(variable.split("=") for variable in variables.split()))


@pytest.mark.parametrize(
    "variables",
    [{}, rank_variables(0, 1), rank_variables(1, 2), {"RANK": "0"}, {"MASTER_PORT": "tcp://10.0.0.1:80"}],
    ids=["none", "one rank", "one machine", "rank 0 alone", "a service of Kubernetes"],
)
def test_a_launch_and_a_process_alone_are_not_refused(variables):
    check_launch(variables)


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST"])
def test_a_rest_of_slurm_s_variables_is_refused(missing):
    names = ("STEP_NUM_TASKS", "PROCID", "LOCALID", "NODEID", "JOB_ID", "STEP_ID", "STEP_NODELIST")
    rest = {f"SLURM_{name}": "2" for name in names}
    del rest[missing]
    with pytest.raises(ConfigError, match=f"^SLURM_STEP_NUM_TASKS is 2, and {missing} is not set; start .* with srun"):
        adopt_srun(rest)
