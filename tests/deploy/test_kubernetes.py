"""Manifests: right by the schemas of the operator and of Kubernetes, and their commands run as they stand."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from distributed import Client, LocalCluster
from typer.testing import CliRunner

from distmm.all_workers import workers_of
from distmm.cli.app import app
from distmm.errors import InputError
from distmm.storage import open_matrix
from distmm.submit import jobfile, kubernetes, manifests, tls
from tests.deploy.kubernetes_schemas import JOB, check, jsonschema
from tests.deploy.ports import free_ports
from tests.scraping import scraping
from tests.tables import later
from tests.until import until

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
SHIPPED = ["job.yaml", "cluster.yaml", "autoscaler.yaml", "claim.yaml"]
SPOT = "cloud.google.com/gke-spot"

controller = pytest.importorskip("dask_kubernetes.operator.controller.controller")


@pytest.mark.parametrize("name", later(SHIPPED))
def test_shipped_manifests_are_right_by_the_schemas(name: str) -> None:
    for manifest in yaml.safe_load_all((DEPLOY / name).read_text()):
        check(manifest)


def test_the_check_of_manifests_sees_a_wrong_key_and_a_wrong_type() -> None:
    _, job = yaml.safe_load_all((DEPLOY / "job.yaml").read_text())
    for key, value in (("nodeSelectors", {}), ("nodeSelector", "gpu")):
        wrong = json.loads(json.dumps(job))
        wrong["spec"]["cluster"]["spec"]["worker"]["spec"][key] = value
        with pytest.raises(jsonschema.ValidationError, match=key if key.endswith("s") else "gpu"):
            check(wrong)


@pytest.mark.parametrize(
    ("name", "options"), [("job", ["--cluster", "kubernetes", "--dry-run"]), ("cluster", ["--only-cluster"])]
)
def test_shipped_manifests_are_what_distmm_submit_prints(name: str, options: list[str], tmp_path: Path) -> None:
    folder = ["--set", f"run.folder={tmp_path}"]
    done = CliRunner().invoke(app, ["submit", str(DEPLOY / f"{name}.toml"), *options, *folder])
    assert (done.exit_code, done.stdout) == (0, (DEPLOY / f"{name}.yaml").read_text())


@pytest.mark.parametrize("options", [["--cluster", "kubernetes", "--dry-run"], ["--only-cluster"]])
def test_printed_manifests_come_with_the_command_that_makes_their_secret(
    options: list[str], job: jobfile.Job, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["submit", str(tmp_path / "job.toml"), *options])
    assert done.exit_code == 0, done.output
    assert "PRIVATE KEY" not in done.output
    (command,) = [line for line in done.stderr.splitlines() if line.startswith("kubectl")]
    for pod in _pods([part["spec"] for part in yaml.safe_load_all(done.stdout)]):
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "tls"]
        assert f"create secret generic {volume['secret']['secretName']} " in command
    files = dict(word.removeprefix("--from-file=").split("=") for word in shlex.split(command)[7:])
    assert sorted(files) == ["ca.pem", "cert.pem", "key.pem"]
    assert all(Path(path).read_text().startswith("-----BEGIN") for path in files.values())
    assert not [path for path in files.values() if Path(path).is_relative_to(tmp_path)]  # which may be a checkout


def test_a_folder_that_cannot_take_certificates_is_named(
    job: jobfile.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"file/distmm/.*set XDG_DATA_HOME to a folder that you can write"):
        kubernetes.secret_command(job)


def test_workers_alone_have_gpus_and_may_run_on_spot_nodes() -> None:
    _, manifest = manifests.job(jobfile.load(DEPLOY / "job.toml"))
    cluster = manifest["spec"]["cluster"]["spec"]
    worker, others = cluster["worker"]["spec"], [cluster["scheduler"]["spec"], manifest["spec"]["job"]["spec"]]
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"} in worker["tolerations"]
    for pod in others:
        assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"]
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": SPOT, "operator": "NotIn", "values": ["true"]}]


def test_matrices_in_an_object_store_need_no_claim_but_its_keys_and_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("/data/", "s3://bucket/").replace('claim = "matrices"', ""))
    policy, manifest = manifests.job(jobfile.load(tmp_path / "job.toml", ["kubernetes.secret=store"]))
    check(policy)
    check(manifest)
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in policy["spec"]["egress"]
    for pod in _pods(manifest["spec"]):
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "store"}}]
        assert "matrices" not in [volume["name"] for volume in pod["volumes"]]
    (tmp_path / "local.toml").write_text(JOB)
    policy, _ = manifests.job(jobfile.load(tmp_path / "local.toml"))
    assert all("to" in rule or rule["ports"][0]["port"] == 53 for rule in policy["spec"]["egress"])


def test_what_the_operator_makes_of_a_job_is_right_by_the_schemas() -> None:
    policy, job = manifests.job(jobfile.load(DEPLOY / "job.toml"))
    spec, labels = job["spec"], job["metadata"]["labels"]
    parts = spec["cluster"]["spec"]
    arguments = {"annotations": {}, "labels": labels}
    made = [
        controller.build_job_pod_spec("product", "product", "matrices", spec["job"]["spec"], **arguments),
        controller.build_scheduler_deployment_spec("product", parts["scheduler"]["spec"], **arguments),
        controller.build_scheduler_service_spec("product", parts["scheduler"]["service"], **arguments),
        controller.build_worker_deployment_spec(
            "product-default", "matrices", "product", "abc", parts["worker"]["spec"], **arguments
        ),
    ]
    for manifest in made:
        check(manifest)
    # The policy and the service find the pods by the labels that the operator gives them.
    pods = [made[0], made[1]["spec"]["template"], made[3]["spec"]["template"]]
    for pod in pods:
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert made[2]["spec"]["selector"].items() <= pods[1]["metadata"]["labels"].items()
    assert f"tls://{made[2]['metadata']['name']}.matrices.svc:8786" in pods[0]["spec"]["containers"][0]["command"]


SITE = """\
[kubernetes]
claim = "matrices"
labels = { team = "physics", "example.com/cost-centre" = "42" }
annotations = { "k8s.v1.cni.cncf.io/networks" = '[{"name": "ib0"}]' }
queue = "gpus"
pull_secret = "registry.example.com"
priority_class = "batch"
runtime_class = "nvidia"
gpu_resource = "nvidia.com/mig-3g.40gb"
rdma_resource = "rdma/hca_shared_devices_a"
scheduler_cpus = 4
scheduler_memory = "16GiB"
ephemeral_storage = "200GB"
"""


def test_what_a_site_asks_for_reaches_every_pod_as_the_operator_makes_them(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace('[kubernetes]\nclaim = "matrices"\n', SITE).replace('"cpu"', '"gpu"'))
    policy, job = manifests.job(jobfile.load(path, ["run.tls=none", "workers.transport=ucx"]))
    check(policy)
    check(job)
    (scheduler, worker, runner), objects = _made(job)
    for made in objects:
        labels = made["metadata"]["labels"]
        assert {"team": "physics", "example.com/cost-centre": "42"}.items() <= labels.items()
        assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
        assert made["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": '[{"name": "ib0"}]'}
    for pod in (scheduler, worker, runner):
        assert pod["imagePullSecrets"] == [{"name": "registry.example.com"}]
        assert pod["priorityClassName"] == "batch"
        assert pod["containers"][0]["resources"]["limits"]["ephemeral-storage"] == "200000000000"
        assert pod["volumes"][0]["emptyDir"] == {"sizeLimit": "200000000000"}
    assert [pod.get("runtimeClassName") for pod in (scheduler, worker, runner)] == [None, "nvidia", None]
    limits = worker["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/mig-3g.40gb"], limits["rdma/hca_shared_devices_a"]) == ("2", "1")
    assert [one["key"] for one in worker["tolerations"]] == ["nvidia.com/gpu", "nvidia.com/mig-3g.40gb"]
    assert scheduler["containers"][0]["resources"]["limits"]["cpu"] == "4"
    assert scheduler["containers"][0]["resources"]["limits"]["memory"] == str(16 * 2**30)
    patience = int(runner["containers"][0]["command"][5])
    assert patience > manifests.QUEUE_SECONDS  # a queue may take days


def _made(job: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the pods of scheduler, worker and client, and all objects that the operator makes, checked."""
    parts = job["spec"]["cluster"]["spec"]
    meta = {"labels": job["metadata"]["labels"], "annotations": job["metadata"].get("annotations", {})}
    worker = controller.build_worker_deployment_spec("p-default", "m", "p", "abc", parts["worker"]["spec"], **meta)
    scheduler = controller.build_scheduler_deployment_spec("p", parts["scheduler"]["spec"], **meta)
    service = controller.build_scheduler_service_spec("p", parts["scheduler"]["service"], **meta)
    runner = controller.build_job_pod_spec("p", "p", "m", job["spec"]["job"]["spec"], **meta)
    pods = [scheduler["spec"]["template"], worker["spec"]["template"], runner]
    for made in (scheduler, worker, service, runner):
        check(made)
    return [pod["spec"] for pod in pods], [scheduler, worker, service, *pods]


@pytest.mark.parametrize(
    ("endpoint", "ports"),
    [
        ("", [443]),
        ("https://store.example.com", [443]),
        ("http://minio.storage.svc:9000", [443, 9000]),
        ("http://store", [80, 443]),
    ],
)
def test_an_object_store_of_ones_own_is_told_to_clients_and_let_through(
    tmp_path: Path, endpoint: str, ports: list[int]
) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("/data/", "s3://bucket/").replace('claim = "matrices"', ""))
    policy, manifest = manifests.job(jobfile.load(tmp_path / "job.toml", [f"kubernetes.endpoint={endpoint}"]))
    check(policy)
    check(manifest)
    assert policy["spec"]["egress"][-1] == {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
    for pod in _pods(manifest["spec"]):
        found = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == "AWS_ENDPOINT_URL"]
        assert found == ([endpoint] if endpoint else [])


def test_no_pod_has_root_a_token_or_a_file_system_to_write_on() -> None:
    for name in ("job.yaml", "cluster.yaml"):
        _, manifest = yaml.safe_load_all((DEPLOY / name).read_text())
        found = list(_pods(manifest["spec"]))
        assert len(found) == (3 if name == "job.yaml" else 2)
        for pod in found:
            assert pod["securityContext"]["runAsNonRoot"]
            assert not pod["automountServiceAccountToken"]
            for container in pod["containers"]:
                context = container["securityContext"]
                assert context["readOnlyRootFilesystem"]
                assert not context["allowPrivilegeEscalation"]
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["limits"]["memory"]


def _pods(part: Any) -> Any:
    if isinstance(part, list):
        for value in part:
            yield from _pods(value)
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        for value in part.values():
            yield from _pods(value)


@pytest.fixture
def job(tmp_path: Path) -> jobfile.Job:
    (tmp_path / "job.toml").write_text(JOB)
    return jobfile.load(tmp_path / "job.toml")


@pytest.mark.minutes
def test_the_commands_and_probes_of_the_pods_work_as_they_stand(job: jobfile.Job, tmp_path: Path) -> None:
    """This test is the kubelet: it starts each container's command with its environment, and asks its probe."""
    rng = np.random.default_rng(6)
    for name in "AB":
        np.save(tmp_path / f"{name}.npy", rng.integers(-9, 9, (200, 200)).astype(float))  # floats need no compiler
    certificates = tls.certificate_paths(job.run.tls, manifests.certificate_folder(job), job.run.name)
    assert certificates is not None
    tls.create(certificates)
    comm, page, worker_page, other_page = free_ports(4)
    names = {
        "/data": str(tmp_path),
        manifests.TLS_FOLDER: os.path.dirname(certificates["key"]),
        "product-scheduler.default.svc:8786": f"127.0.0.1:{comm}",
        "$(DASK_WORKER_NAME)": "product-default-worker-1",
        ":8787": f"127.0.0.1:{page}",
        "8788-8789": f"{worker_page}-{other_page}",
    }

    def there(text: str) -> str:
        for name, local in names.items():
            text = text.replace(name, local)
        return str(comm) if text == "8786" else sys.executable if text == "python" else text

    def start(pod: dict[str, Any]) -> subprocess.Popen[bytes]:
        (container,) = pod["containers"]
        environment = {entry["name"]: there(entry["value"]) for entry in container["env"]}
        root = Path(__file__).parents[2]
        environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": f"{root}:{root / 'kernels'}"}
        return subprocess.Popen([there(word) for word in container["command"]], env=environment)

    _, manifest = manifests.job(job)
    spec = manifest["spec"]["cluster"]["spec"]
    running = [start(spec["scheduler"]["spec"])]
    try:
        running.append(start(spec["worker"]["spec"]))
        client = start(manifest["spec"]["job"]["spec"])
        running.append(client)
        until(lambda: _healthy(page))
        until(lambda: _healthy(worker_page) and _healthy(other_page))
        assert client.wait(200) == 0
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(120)
    expected = np.load(tmp_path / "A.npy") @ np.load(tmp_path / "B.npy")
    assert np.array_equal(open_matrix(tmp_path / "C.zarr")[:, :], expected)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.minutes
def test_prometheus_reaches_each_of_eight_workers_of_a_pod_by_the_ports_that_it_declares(
    job: jobfile.Job, tmp_path: Path
) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("no Prometheus here: apt-get install prometheus")
    many = job.model_copy(update={"workers": job.workers.model_copy(update={"per_node": 8, "memory": "8GB"})})
    pod = manifests.job(many)[1]["spec"]["cluster"]["spec"]["worker"]["spec"]
    (container,) = pod["containers"]
    monitor = yaml.safe_load((DEPLOY / "monitor.yaml").read_text())
    scraped = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    declared = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [declared[name] for name in scraped] == list(range(8788, 8796))
    first, *_ = ports = free_ports(8)
    environment = {entry["name"]: entry["value"] for entry in container["env"] if "TLS" not in entry["name"]}
    assert environment["DASK_DISTMM__WORKER_PORTS"] == "8788-8795"
    root = Path(__file__).parents[2]
    environment |= {"DASK_DISTMM__WORKER_PORTS": f"{first}-{ports[-1]}", "PATH": os.environ["PATH"]}
    environment |= {"PYTHONPATH": f"{root}:{root / 'kernels'}", "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "False"}
    with LocalCluster(n_workers=0, dashboard_address=":0") as cluster, Client(cluster) as client:
        words = [word for word in container["command"] if word not in ("--protocol", "tls")]
        addresses = {"python": sys.executable, "tls://product-scheduler.default.svc:8786": cluster.scheduler_address}
        command = [addresses.get(word, word.replace("$(DASK_WORKER_NAME)", "pod")) for word in words]
        with subprocess.Popen(command, env=environment) as workers:
            try:
                client.wait_for_workers(8, timeout=120)
                targets = json.dumps([f"127.0.0.1:{port}" for port in ports])
                text = "scrape_configs: [{job_name: pod, scrape_interval: 1s, static_configs: [{targets: %s}]}]"
                with scraping(prometheus, text % targets, tmp_path) as ask:
                    until(lambda: len(ask("up == 1")) == 8)
                services = workers_of(client).values()
                assert sorted(worker["services"]["dashboard"] for worker in services) == ports
            finally:
                workers.terminate()


def test_prometheus_may_come_in_where_the_job_file_names_its_namespace(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    policy, _ = manifests.job(jobfile.load(tmp_path / "job.toml", ["kubernetes.monitoring=observability"]))
    check(policy)
    (_, rule) = policy["spec"]["ingress"]
    (source,) = rule["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "observability"}
    assert rule["ports"][1] == {"protocol": "TCP", "port": 8788, "endPort": 8789}
    closed, _ = manifests.job(jobfile.load(tmp_path / "job.toml"))
    assert len(closed["spec"]["ingress"]) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("product.a=/elsewhere/A.npy", r"product.a = '/elsewhere/A.npy' is not seen by pods"),
        ("kubernetes.claim=", "C would be lost with its pod: set kubernetes.claim"),
        ("run.walltime=4h", "run.walltime = '4h': pods have no walltime.*leave it out"),
        ("workers.interface=ib0", "workers.interface = 'ib0': the cluster chooses the networks of pods"),
        ("run.restarts=3", "run.restarts = 3: pods have no walltime.*leave it out"),
    ],
)
def test_what_means_nothing_in_pods_is_refused(tmp_path: Path, change: str, said: str) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    with pytest.raises(InputError, match=said):
        manifests.job(jobfile.load(tmp_path / "job.toml", [change]))


def test_names_that_yaml_reads_as_numbers_or_booleans_stay_names(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    changes = ["run.name=on", "kubernetes.namespace=1e3", "kubernetes.monitoring=0", "kubernetes.spot=pool=true"]
    policy, manifest = manifests.job(jobfile.load(tmp_path / "job.toml", changes))
    for made in (policy, manifest):
        check(made)
        assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("on", "1e3")
    assert policy["spec"]["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"].popitem()[1] == "0"


def test_a_path_cannot_refer_to_the_pods_environment(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("/data/A.npy", "/data/$(AWS_SECRET_ACCESS_KEY).npy"))
    _, manifest = manifests.job(jobfile.load(tmp_path / "job.toml"))
    command = manifest["spec"]["job"]["spec"]["containers"][0]["command"]
    assert "/data/$$(AWS_SECRET_ACCESS_KEY).npy" in command


@pytest.mark.parametrize("name", ["\U0001f9ea", "{{ run }}", "a: b #c", "<&>", "*x, [y]"])
def test_a_path_keeps_its_characters_in_yaml(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("/data/A.npy", f"/data/{name}.npy"))
    printed = manifests.dump(manifests.job(jobfile.load(tmp_path / "job.toml")))
    *_, manifest = yaml.safe_load_all(printed)
    assert f"/data/{name}.npy" in manifest["spec"]["job"]["spec"]["containers"][0]["command"]
