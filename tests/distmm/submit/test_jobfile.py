"""The job file: what its keys mean, what is refused, and that errors name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm import units
from distmm.errors import InputError
from distmm.submit import jobfile

PRODUCT = """\
[product]
a = "A.zarr"
b = "B.h5:/weights/W"
c = "C.zarr"
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "job.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_relative_paths_start_at_the_job_file_and_urls_stay(write, tmp_path: Path) -> None:
    job = jobfile.load(write(PRODUCT.replace("A.zarr", "s3://bucket/A.zarr") + '[run]\ntls = "keys"\nfolder = "run"'))
    assert (job.product.a, job.product.b) == ("s3://bucket/A.zarr", f"{tmp_path}/B.h5:/weights/W")
    assert (job.run.folder, job.run.tls) == (f"{tmp_path}/run", f"{tmp_path}/keys")


def test_the_product_becomes_the_options_of_multiply(write) -> None:
    more = 'transb = true\nblocks = "4096x2048x4096"\nkernel = "cublas"\nplan = "g2x2x1 b4096x2048x4096 p1 w2x4 l2"\n'
    job = jobfile.load(write(PRODUCT.replace('"A.zarr"', '"/A.zarr"') + more + '[workers]\ndevice = "cpu"\n'))
    words = " ".join(job.command())
    assert words.startswith("multiply /A.zarr ")
    assert (
        " --transb --precision highest --check freivalds --kernel cublas --blocks 4096x2048x4096 --plan g2x2x1" in words
    )
    assert words.endswith(" --device cpu")
    assert "g2x2x1 b4096x2048x4096 p1 w2x4 l2" in job.command()  # one argument


def test_memory_of_a_node_is_shared_by_its_workers_and_leaves_some_for_the_scheduler(write) -> None:
    job = jobfile.load(write(PRODUCT + '[workers]\nnodes = 2\nper_node = 8\nmemory = "900GB"\n'))
    assert job.workers.count == 16
    assert job.workers.memory_each == (900 - 8) * 10**9 // 8


@pytest.mark.parametrize("walltime", ["4h", "04:00:00", "240m", "3h60m", "14400", "0-04:00:00"])
def test_a_walltime_is_written_as_a_deadline_is(write, walltime: str) -> None:
    assert jobfile.load(write(PRODUCT), [f"run.walltime={walltime}"]).seconds("walltime") == 4 * 3600
    assert units.seconds(walltime) == 4 * 3600


def test_days_are_written_as_slurm_writes_them() -> None:
    assert units.seconds("2-12:00:00") == 60 * 3600
    for text in ("2-12:00", "2-", "-12:00:00", "2-1h"):
        with pytest.raises(InputError, match="is no time"):
            units.seconds(text)


def test_keys_can_be_set_from_outside(write) -> None:
    changes = ["workers.nodes=4", "run.walltime=8h", "product.transa=true", "slurm.partition=gpu", "product.blocks=500"]
    job = jobfile.load(write(PRODUCT + "[workers]\nnodes = 2\n"), changes)
    assert (job.workers.nodes, job.seconds("walltime"), job.slurm.partition) == (4, 8 * 3600, "gpu")
    assert job.product.transa
    assert job.product.blocks == "500"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("worker.nodes=4", r"\[worker\] is not a table of a job file"),
        ("run.walltime=90", "grace = 5m leaves no time of walltime = 90"),
    ],
)
def test_an_error_names_the_key_that_is_set_where_the_file_has_no_such_table(write, change: str, said: str) -> None:
    with pytest.raises(InputError, match=f"^--set {change}: {said}"):
        jobfile.load(write(PRODUCT), [change])


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('[product]\na = "A"\nb = "B"\n', 1, r"\[product\] lacks c"),
        ("", None, r"\[product\] lacks a, b, c"),
        (PRODUCT + "[product\n", 5, "not TOML"),
        (PRODUCT + "[worker]\nnodes = 1\n", 5, r"\[worker\] is not a table of a job file; known are product, run"),
        (PRODUCT + "\n[workers]\nnode = 1\n", 7, "has no key 'node'; known are nodes, per_node"),
        (PRODUCT + '[workers]\nnodes = "2"\n', 6, "nodes = '2' is not a whole number"),
        (PRODUCT + "[workers]\nnodes = true\n", 6, "nodes = True is not a whole number"),
        (PRODUCT + "[workers]\nnodes = 0\n", 6, "nodes = 0 is not a number from 1 to 100000"),
        (PRODUCT + '[workers]\nmemory = "lots"\n', 6, "is not a size"),
        (PRODUCT + '[workers]\nmemory = "1e400"\n', 6, "is not a size"),
        (PRODUCT + '[workers]\nmemory = "300MB"\n', 6, "memory = 300MB of a node leaves 270 MB for each worker"),
        (PRODUCT + '[workers]\nper_node = 8\nmemory = "2GB"\n', 7, "leaves 225 MB for each worker"),
        (PRODUCT + 'blocks = "0"\n', 5, "blocks = '0' is not edges"),
        (PRODUCT + 'blocks = "64x0x64"\n', 5, "blocks = '64x0x64' is not edges"),
        (PRODUCT + '[workers]\ndevice = "tpu"\n', 6, "device = 'tpu' is not one of gpu, cpu"),
        (PRODUCT + '[run]\nwalltime = "1h"\ngrace = "2h"\n', 7, "leaves no time of walltime"),
        (PRODUCT + '[run]\ntls = "temporary"\n[workers]\ntransport = "ucx"\n', 6, "UCX is not encrypted"),
        (PRODUCT + "product.a = 3\n", 5, "not TOML|not text|no key"),
        ("a = 1\n" + PRODUCT, 1, r"\[a\] is not a table"),
        (PRODUCT + "transa = 1\n", 5, "transa = 1 is not true or false"),
    ],
)
def test_errors_name_the_line_and_what_should_be_there(write, text: str, line: int | None, said: str) -> None:
    path = write(text)
    with pytest.raises(InputError, match=said) as error:
        jobfile.load(path)
    assert str(error.value).startswith(f"{path}:{line}: " if line else f"{path}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "../../etc/cron.d/x"),
        ("run.name", "a b; rm -rf ~"),
        ("run.folder", "../elsewhere"),
        ("run.folder", "--wrap=evil"),
        ("run.folder", 'x" --wrap="evil'),
        ("product.c", "/scratch/../home/me/.ssh/authorized_keys"),
        ("product.c", "C.h5:/../../x"),
        ("product.a", "--output"),
        ("product.a", "~root/A.npy"),
        ("product.c", "file:///data/C.zarr"),
        ("product.kernel", "tiled; evil"),
        ("product.blocks", "64 --overwrite"),
        ("product.plan", "g2x2x1 b64x64x64 p1 w1 l2 --overwrite"),
        ("workers.interface", "ib0 $(evil)"),
        ("slurm.partition", "gpu --wrap=evil"),
        ("slurm.constraint", "a b"),
        ("kubernetes.namespace", "kube-system/secrets"),
        ("kubernetes.image", "distmm\n  privileged: true"),
        ("kubernetes.spot", "a=b=c"),
        ("kubernetes.mount", "/data/../etc"),
        ("kubernetes.node_label", "-pool=gpu"),
        ("kubernetes.spot", f"pool={'x' * 64}"),
        ("kubernetes.pull_secret", "Registry"),
        ("kubernetes.claim", "a" * 254),
        ("kubernetes.queue", "gpus.large"),
        ("kubernetes.gpu_resource", "gpu"),
        ("kubernetes.gpu_resource", "kubernetes.io/gpu"),
        ("kubernetes.rdma_resource", "rdma/hca devices"),
        ("kubernetes.endpoint", "store:9000"),
        ("kubernetes.endpoint", "http://key:secret@store:9000"),
        ("kubernetes.endpoint", "http://store:65536"),
        ("kubernetes.ephemeral_storage", "much"),
    ],
)
def test_hostile_values_are_refused(write, key: str, value: str) -> None:
    table, name = key.split(".")
    tables = {"product": {"a": "A.npy", "b": "B.npy", "c": "C.zarr"}}
    tables.setdefault(table, {})[name] = value
    text = ""
    for head, rows in tables.items():
        text += f"[{head}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in rows.items())
    with pytest.raises(InputError, match=rf"job.toml:\d+: {name} = .* is not "):
        jobfile.load(write(text))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('labels = "physics"', "labels = 'physics' is not a table such as { team = \"physics\" }"),
        ("labels = { team = 3 }", "labels = 3 is not text in quotes"),
        ('labels = { team = "solid state" }', "is not labels by Kubernetes' rules"),
        ('labels = { "a/b/c" = "d" }', "is not labels by Kubernetes' rules"),
        ('labels = { "dask.org/cluster-name" = "other" }', "none of dask.org"),
        ('labels = { "app.kubernetes.io/instance" = "other" }', "none of dask.org, app.kubernetes.io"),
        ('labels = { "kueue.x-k8s.io/queue-name" = "gpus" }', "set the queue of Kueue by kubernetes.queue"),
        ('annotations = { "-x" = "" }', "is not annotations by Kubernetes' rules"),
        ('annotations = { x = "a\\nb" }', "values of one line"),
        ('annotations = { "kubectl.kubernetes.io/x" = "" }', "which the operator ignores"),
    ],
)
def test_labels_and_annotations_that_kubernetes_or_the_operator_would_not_take_are_refused(
    write, entry: str, said: str
) -> None:
    with pytest.raises(InputError) as error:
        jobfile.load(write(PRODUCT + f"[kubernetes]\n{entry}\n"))
    assert str(error.value).startswith(f"{write(PRODUCT + f'[kubernetes]{chr(10)}{entry}')}:6: ")
    assert said in str(error.value)


def test_rdma_without_ucx_is_refused(write) -> None:
    with pytest.raises(InputError, match=r"job.toml:6: RDMA needs UCX.*workers.transport = 'ucx'"):
        jobfile.load(write(PRODUCT + '[kubernetes]\nrdma_resource = "rdma/hca"\n'))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"x" * 70_000, "larger than 65536 bytes"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a = " + b"[" * 20_000, "not TOML"),
        (b"a = " + b"9" * 20_000, "not TOML"),
    ],
)
def test_hostile_files_are_refused_before_they_cost_anything(write, raw: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        jobfile.load(write(raw))


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no.toml: cannot be read: No such file"):
        jobfile.load(tmp_path / "no.toml")


@pytest.mark.parametrize("change", ["nodes=4", "workers.nodes", "workers.nodes.x=4", "--wrap"])
def test_a_malformed_change_is_refused(write, change: str) -> None:
    with pytest.raises(InputError, match=r"write it as table.key=value"):
        jobfile.load(write(PRODUCT), [change])


@given(st.text(max_size=200))
def test_any_text_is_a_job_or_an_input_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(PRODUCT + text, encoding="utf-8", errors="surrogatepass")
    try:
        job = jobfile.load(path)
    except InputError as error:
        said = str(error)
    else:
        said = f"{path}" if isinstance(job, jobfile.Job) else ""
    assert said.startswith(str(path))


@pytest.mark.parametrize("name", ["a\ntouch evil\n", 'a"b', "a\x1bb", "a`b"])
def test_a_job_file_in_a_folder_that_no_script_can_name_is_refused(name: str, tmp_path: Path) -> None:
    """The path stands in a comment for sbatch. A line break would end the comment, and the rest would be a command."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "job.toml").write_text(PRODUCT)
    with pytest.raises(InputError, match="quotes, backslashes or unprintable characters"):
        jobfile.load(tmp_path / name / "job.toml")


def test_a_byte_order_mark_is_no_text(write) -> None:
    assert jobfile.load(write(b"\xef\xbb\xbf" + PRODUCT.replace("\n", "\r\n").encode())) == jobfile.load(write(PRODUCT))
    with pytest.raises(InputError, match=r"job\.toml:5:"):  # lines are counted as before
        jobfile.load(write(b"\xef\xbb\xbf" + PRODUCT.encode() + b"colour = 1\n"))
