"""Jobs on Kubernetes are submitted, followed and explained, with a kubectl that answers what a cluster would."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distmm.errors import InputError
from distmm.submit import jobfile, kubernetes, manifests, patience, tls
from tests.deploy.kubernetes_schemas import JOB, check

# A kubectl that answers from a folder of files: what a cluster would say. It notes what it is asked.
KUBECTL = """\
#!{python}
import json, sys
from pathlib import Path
folder, words = Path({folder!r}), sys.argv[3:]
with (folder / "asked").open("a") as file:
    print(*words, file=file)
silent = folder / "silent"
if silent.exists() and (left := int(silent.read_text())):
    silent.write_text(str(left - 1))
    sys.exit("Unable to connect to the server: dial tcp: connection refused")
if (folder / "missing").exists() and words[:3] == ["get", *(folder / "missing").read_text().split()]:
    sys.exit(f'Error from server (NotFound): {{words[1]}}s "{{words[2]}}" not found')
if words[0] in ("apply", "create"):
    with (folder / ("applied" if words[0] == "apply" else "created")).open("a") as file:
        file.write(sys.stdin.read() + "---\\n")
elif words[0] == "get":
    answer = folder / (words[1] + ".json")
    print(answer.read_text() if answer.exists() else json.dumps({{"items": []}}))
elif words[0] == "logs":
    print("Plan\\nDone")
"""


@pytest.fixture
def job(tmp_path: Path) -> jobfile.Job:
    (tmp_path / "job.toml").write_text(JOB)
    return jobfile.load(tmp_path / "job.toml")


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kubectl"
    folder.mkdir()
    program = folder / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(kubernetes, "POLL_SECONDS", 0.01)
    _answer(folder, "daskjob", {"metadata": {"name": "product", "uid": "u1"}, "status": {"jobStatus": "Running"}})
    return folder


def _answer(folder: Path, what: str, answer: Any) -> None:
    (folder / f"{what}.json").write_text(json.dumps(answer))


def _runner(phase: str, code: int | None = None) -> dict[str, Any]:
    states = [] if code is None else [{"state": {"terminated": {"exitCode": code}}}]
    return {"metadata": {"name": "product-runner"}, "status": {"phase": phase, "containerStatuses": states}}


def test_a_submitted_job_takes_its_policy_and_certificates_along_and_removes_them_with_itself(
    job: jobfile.Job, answers: Path
) -> None:
    kubernetes.submit(job)
    found = [part for part in yaml.safe_load_all((answers / "applied").read_text()) if part]
    assert [part["kind"] for part in found] == ["NetworkPolicy", "DaskJob", "NetworkPolicy"]
    assert found[2]["spec"] == found[0]["spec"]
    # What is applied is kept in an annotation: a private key must not be.
    (secret,) = [part for part in yaml.safe_load_all((answers / "created").read_text()) if part]
    assert secret["kind"] == "Secret"
    assert "delete secret product-tls --ignore-not-found\ncreate " in (answers / "asked").read_text()
    for part in (found[2], secret):
        check(part)
        assert part["metadata"]["ownerReferences"][0]["uid"] == "u1"
    assert secret["stringData"]["key.pem"].startswith("-----BEGIN PRIVATE KEY-----")
    certificates = tls.certificate_paths(job.run.tls, manifests.certificate_folder(job), job.run.name)
    assert certificates is not None
    assert stat.S_IMODE(os.stat(os.path.dirname(certificates["key"])).st_mode) == 0o700


@pytest.mark.parametrize(("key", "kind"), [("claim", "persistentvolumeclaim"), ("secret", "secret")])
def test_what_pods_would_wait_for_in_vain_is_refused_before_they_are_made(
    job: jobfile.Job, answers: Path, key: str, kind: str
) -> None:
    asked = job.model_copy(update={"kubernetes": job.kubernetes.model_copy(update={key: "keys"})})
    (answers / "missing").write_text(f"{kind} keys")
    with pytest.raises(InputError, match=rf"kubernetes.{key} = 'keys': namespace default has no such {kind}"):
        kubernetes.submit(asked)
    assert not (answers / "applied").exists()


@pytest.mark.parametrize(
    ("phase", "code", "outcome"), [("Succeeded", 0, 0), ("Failed", 1, 1), ("Failed", None, 75), ("Failed", 143, 75)]
)
def test_a_job_is_followed_to_the_end_of_its_pod(
    job: jobfile.Job, answers: Path, phase: str, code: int | None, outcome: int
) -> None:
    _answer(answers, "pods", {"items": [_runner(phase, code)]})
    said: list[str] = []
    assert kubernetes.follow("default/product", said.append) == outcome
    assert said == [f"daskjob product: Running; pods: 1 {phase.lower()}", "Plan", "Done"]


def test_a_cluster_that_does_not_answer_for_a_while_ends_nothing(answers: Path) -> None:
    _answer(answers, "pods", {"items": [_runner("Succeeded", 0)]})
    (answers / "silent").write_text("3")
    said: list[str] = []
    assert kubernetes.follow("default/product", said.append) == 0
    silence, back, *rest = said
    assert silence.startswith("the cluster does not answer; asking again for 10 min: kubectl get: Unable to connect")
    assert back == "the cluster answers again"
    assert rest == ["daskjob product: Running; pods: 1 succeeded", "Plan", "Done"]


def test_a_cluster_that_is_silent_for_ten_minutes_ends_the_wait(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.1)
    (answers / "silent").write_text("1000")
    with pytest.raises(InputError, match=r"connection refused; the job may still run.* --follow default/product"):
        kubernetes.follow("product", lambda line: None)


def test_a_job_that_can_never_start_is_deleted_and_said_why(job: jobfile.Job, answers: Path) -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": 'persistentvolumeclaim "matrices" not found'}
    pod = {"metadata": {"name": "product-runner"}, "status": {"phase": "Pending", "conditions": [condition]}}
    _answer(answers, "pods", {"items": [pod]})
    with pytest.raises(InputError, match="can never start and was deleted: pod product-runner: persistentvolumeclaim"):
        kubernetes.follow("default/product", lambda line: None)
    assert "delete daskjob product --wait=false" in (answers / "asked").read_text()


@pytest.mark.minutes
def test_a_job_of_the_same_name_is_replaced_once_it_has_ended(job: jobfile.Job, answers: Path) -> None:
    _answer(answers, "daskjobs", {"items": [{}]})
    _answer(answers, "pods", {"items": [_runner("Running")]})
    with pytest.raises(InputError, match=r"exists already, and has not ended: give another run.name"):
        kubernetes.submit(job)
    _answer(answers, "pods", {"items": [_runner("Failed", 75)]})
    kubernetes.submit(job)
    assert "delete daskjob product\n" in (answers / "asked").read_text()
