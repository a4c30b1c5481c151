"""The Kustomize folders: they render, fit their schemas, and say what this program and its drain need."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.commands import cli, settings
from tests.deploy import schemas

ROOT = Path(__file__).parents[2]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
FOLDERS = sorted(str(path.parent.relative_to(KUSTOMIZE)) for path in KUSTOMIZE.rglob("kustomization.yaml"))
SINGLE = ("base", "overlays/gpu", "overlays/tpu")
GROUPS = ("hosts", "overlays/a100-2x8", "overlays/tpu-slice")
STOPPING = 5  # seconds that a server takes to end once it has drained, at most


@pytest.fixture(scope="module")
def render() -> Any:
    """Renders a folder to its objects: `render("base")`."""
    if kustomize := shutil.which("kustomize"):
        command = [kustomize, "build"]
    elif kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize"]
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    known: dict[str, list[dict[str, Any]]] = {}

    def rendered(folder: str) -> list[dict[str, Any]]:
        if folder not in known:
            done = subprocess.run([*command, str(KUSTOMIZE / folder)], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert not done.stderr, done.stderr  # what is deprecated is told there
            known[folder] = list(yaml.safe_load_all(done.stdout))
        return known[folder]

    return rendered


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by what they are: front, and of several hosts worker."""
    found = [each["spec"]["template"] for each in of_kind(objects, "Deployment")]
    for each in of_kind(objects, "LeaderWorkerSet"):
        group = each["spec"]["leaderWorkerTemplate"]
        found += [group["leaderTemplate"], group["workerTemplate"]]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}


def containers(objects: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(container, pod) of every template."""
    for template in templates(objects).values():
        for container in template["spec"]["containers"]:
            yield container, template["spec"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_every_folder_is_known() -> None:
    assert sorted(FOLDERS) == sorted(["common", *SINGLE, *GROUPS])


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_renders_to_what_its_schemas_allow(render: Any, folder: str) -> None:
    objects = render(folder)
    kinds = {each["kind"] for each in objects}
    assert {"Service", "PodMonitor", "NetworkPolicy"} <= kinds
    assert ("Deployment" in kinds, "LeaderWorkerSet" in kinds) == (folder in SINGLE, folder in GROUPS)
    for each in objects:
        schemas.check(each)


@pytest.mark.schemas
@pytest.mark.parametrize("folder", [*SINGLE, *GROUPS])
def test_kubernetes_own_schemas_allow_it(render: Any, folder: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    objects = [each for each in render(folder) if each["kind"] not in schemas.OF_OTHERS]
    for name, template in templates(render(folder)).items():  # a template of others' is that of a pod as well
        metadata = template["metadata"] | {"name": name}
        objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    for each in objects:
        validate.validate(each, "1.32", strict=True)


@pytest.mark.parametrize("folder", [*SINGLE, *GROUPS])
def test_the_command_line_takes_its_settings(
    render: Any, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for container, _ in containers(render(folder)):
        assert "command" not in container  # the image's own
        args = container["args"]
        assert ("--hosts=auto" in args) == (folder in GROUPS)
        for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
            monkeypatch.delenv(name)
        for name, value in environment(container).items():
            monkeypatch.setenv(name, value)
        parsed = cli.parser().parse_args(args)
        given = {each.name for each in parsed.settings if each.source != "default"}
        assert given >= {
            name.removeprefix(settings.PREFIX).lower().replace("_", "-") for name in environment(container)
        }
    # What Kubernetes would add for a service called jaxserve, were enableServiceLinks left alone.
    monkeypatch.setenv("JAXSERVE_PORT", "tcp://10.0.0.1:50051")
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["serve"])
    assert "JAXSERVE_PORT" in capsys.readouterr().err


@pytest.mark.parametrize("folder", [*SINGLE, *GROUPS])
def test_grace_period_and_probes(render: Any, folder: str) -> None:
    front = templates(render(folder))["front"]["spec"]
    (container,) = front["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"grpc": 50051, "http": 8000, "metrics": int(environment(container)["JAXSERVE_METRICS_PORT"])}
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(environment(container)["JAXSERVE_DRAIN_SECONDS"])
    assert front["terminationGracePeriodSeconds"] >= before + drain + STOPPING
    seconds = {}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}  # open without a key
        seconds[probe] = container[probe]["periodSeconds"] * container[probe]["failureThreshold"]
    assert seconds["readinessProbe"] <= 10 < 30 <= seconds["livenessProbe"]
    # A server that drains says 503: it is not to be killed for it.
    assert seconds["livenessProbe"] > drain
    assert seconds["startupProbe"] >= float(environment(container).get("JAXSERVE_JOIN_TIMEOUT", 0)) + 600


@pytest.mark.parametrize("folder", [*SINGLE, *GROUPS])
def test_nothing_may_do_more_than_it_needs(render: Any, folder: str) -> None:
    for container, pod in containers(render(folder)):
        assert (pod["enableServiceLinks"], pod["automountServiceAccountToken"]) == (False, False)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] >= 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        mounted = {each["name"]: each for each in container["volumeMounts"]}
        assert set(mounted) == {each["name"] for each in pod["volumes"]}
        written = {each["mountPath"] for each in mounted.values() if not each.get("readOnly")}
        assert written <= {"/cache", "/tmp", "/dev/shm"}
        for name in ("JAXSERVE_MODEL", "JAXSERVE_API_KEYS", "JAXSERVE_HOSTS_SECRET"):
            path = environment(container).get(name)
            assert path is None or any(path.startswith(each["mountPath"]) for each in mounted.values())


@pytest.mark.parametrize("folder", [*SINGLE, *GROUPS])
def test_who_reaches_the_front_door_reaches_the_front_alone(render: Any, folder: str) -> None:
    objects = render(folder)
    front = templates(objects)["front"]
    labels = front["metadata"]["labels"]
    names = {each["name"] for each in front["spec"]["containers"][0]["ports"]}
    (service,), (monitor,) = of_kind(objects, "Service"), of_kind(objects, "PodMonitor")
    for selector in (service["spec"]["selector"], monitor["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
        for name, template in templates(objects).items():
            assert (selector.items() <= template["metadata"]["labels"].items()) == (name == "front")
    assert {each["targetPort"] for each in service["spec"]["ports"]} == {"grpc", "http"} <= names
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    for policy in of_kind(objects, "NetworkPolicy"):
        assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        for template in templates(objects).values():
            assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "a rule without it lets everybody in"
            assert {each["port"] for each in rule.get("ports", [])} <= names
    assert len(of_kind(objects, "NetworkPolicy")) == (1 if folder in SINGLE else 2)


@pytest.mark.parametrize("folder", GROUPS)
def test_hosts_are_alike_and_start_and_fail_together(render: Any, folder: str) -> None:
    ((group,),) = [of_kind(render(folder), "LeaderWorkerSet")]
    assert group["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group["spec"]["startupPolicy"] == "LeaderCreated"  # they wait for each other
    pods = {name: template["spec"] for name, template in templates(render(folder)).items()}
    (front,), (worker,) = pods["front"]["containers"], pods["worker"]["containers"]
    for name in ("args", "image", "resources", "securityContext"):
        assert front.get(name) == worker.get(name), name
    for name in ("nodeSelector", "tolerations", "terminationGracePeriodSeconds", "securityContext"):
        assert pods["front"].get(name) == pods["worker"].get(name), name
    assert environment(worker).items() <= environment(front).items()
    assert "JAXSERVE_HOSTS_SECRET" in environment(worker)
    for pod in pods.values():
        (volume,) = [each for each in pod["volumes"] if each["name"] == "hosts"]
        assert volume["secret"] == {"secretName": "jaxserve-hosts"}
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & set(worker)  # it serves no HTTP


@pytest.mark.parametrize(
    ("folder", "device", "hosts"),
    [
        ("overlays/gpu", "nvidia.com/gpu", 1),
        ("overlays/tpu", "google.com/tpu", 1),
        ("overlays/a100-2x8", "nvidia.com/gpu", 2),
        ("overlays/tpu-slice", "google.com/tpu", 4),
    ],
)
def test_there_are_as_many_devices_as_the_layout_takes(render: Any, folder: str, device: str, hosts: int) -> None:
    for group in of_kind(render(folder), "LeaderWorkerSet"):
        assert group["spec"]["leaderWorkerTemplate"]["size"] == hosts
    for container, _ in containers(render(folder)):
        given = dict(each.removeprefix("--").split("=") for each in container["args"] if "=" in each)
        given |= {name.removeprefix(settings.PREFIX).lower(): value for name, value in environment(container).items()}
        layout = int(given.get("tensor", 1)) * int(given.get("stages", 1))
        assert hosts * int(container["resources"]["limits"][device]) == layout
        kind = {"nvidia.com/gpu": "gpu", "google.com/tpu": "tpu"}[device]
        assert container["image"] == f"jaxserve:{kind}"
