"""The Kustomize folders: they render, fit their schemas, and say what this program and its drain need."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.commands import cli, settings
from tests.deploy import published, schemas
from tests.deploy.rendered import KUSTOMIZE, of_kind, render

FOLDERS = sorted(str(path.parent.relative_to(KUSTOMIZE)) for path in KUSTOMIZE.rglob("kustomization.yaml"))
POOL = "overlays/gpu-pool"
SINGLE = ("base", "overlays/gpu", POOL, "overlays/h200-8", "overlays/tpu", "overlays/tpu-v6e")
GROUPS = ("hosts", "overlays/a100-2x8", "overlays/tpu-slice")
STOPPING = 5  # seconds that a server takes to end once it has drained, at most


def templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by what they are: front, and of several hosts worker."""
    found = [each["spec"]["template"] for each in of_kind(objects, "Deployment", "jaxserve")]
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
    components = ["components/gateway", "components/scaling"]  # of the pool
    assert sorted(FOLDERS) == sorted(["common", *components, *SINGLE, *GROUPS])


@pytest.mark.parametrize("folder", ["common", *SINGLE, *GROUPS])
def test_it_renders_to_what_its_schemas_allow(folder: str) -> None:
    objects = render(folder)
    kinds = {each["kind"] for each in objects}
    assert {"Service", "PodMonitor", "NetworkPolicy", "PodDisruptionBudget"} <= kinds
    assert ("Deployment" in kinds, "LeaderWorkerSet" in kinds) == (folder in SINGLE, folder in GROUPS)
    for each in objects:
        schemas.check(each)


@pytest.mark.schemas
@pytest.mark.parametrize("folder", [*SINGLE, *GROUPS])
def test_kubernetes_own_schemas_allow_it(folder: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    objects = [each for each in render(folder) if each["kind"] not in schemas.OF_OTHERS]
    for name, template in templates(render(folder)).items():  # a template of others' is that of a pod as well
        metadata = template["metadata"] | {"name": name}
        objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    for each in objects:
        validate.validate(each, "1.32", strict=True)


@pytest.mark.schemas
def test_whole_definitions_are_read(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema", reason="kubernetes-validate is not installed")
    size = {"type": "object", "required": ["n"], "properties": {"n": {"x-kubernetes-int-or-string": True}}}
    spec = {"type": "object", "properties": {"sizes": {"type": "array", "items": size}}}
    schema = {"type": "object", "properties": {"apiVersion": {}, "kind": {}, "metadata": {}, "spec": spec}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
    definition = {"group": "a.b", "names": {"kind": "Thing"}, "versions": [version]}
    crd = {"kind": "CustomResourceDefinition", "spec": definition}
    (file := tmp_path / "crds.yaml").write_text(yaml.safe_dump({"kind": "List", "items": [crd]}))
    thing = {"apiVersion": "a.b/v1", "kind": "Thing", "metadata": {"name": "it"}}
    good = thing | {"spec": {"sizes": [{"n": 1}, {"n": "50%"}]}}
    wrong = [thing, thing | {"spec": {"sizes": [{}]}}, thing | {"spec": {"sizes": [{"n": 1, "m": 2}]}}]
    schemas_read = published.read([file])
    assert not list(published.problems([good], schemas_read))
    assert len(list(published.problems(wrong, schemas_read))) == 3


@pytest.mark.parametrize("folder", [*SINGLE, *GROUPS])
def test_the_command_line_takes_its_settings(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
def test_grace_period_and_probes(folder: str) -> None:
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
def test_nothing_may_do_more_than_it_needs(folder: str) -> None:
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
def test_only_the_front_has_the_labels_of_the_service(folder: str) -> None:
    objects = render(folder)
    front = templates(objects)["front"]
    labels = front["metadata"]["labels"]
    names = {each["name"] for each in front["spec"]["containers"][0]["ports"]}
    (service,), (monitor,) = of_kind(objects, "Service", "jaxserve"), of_kind(objects, "PodMonitor")
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    selected = [each["spec"]["selector"]["matchLabels"] for each in (monitor, budget)]
    for selector in (service["spec"]["selector"], *selected):
        assert selector.items() <= labels.items()
        for name, template in templates(objects).items():
            assert (selector.items() <= template["metadata"]["labels"].items()) == (name == "front")
    assert {each["targetPort"] for each in service["spec"]["ports"]} == {"grpc", "http"} <= names
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    for policy in of_kind(objects, "NetworkPolicy"):
        assert set(policy["spec"]["policyTypes"]) >= {"Ingress"}
        for template in templates(objects).values():
            assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "a rule without it lets everybody in"
            assert {each["port"] for each in rule.get("ports", [])} <= names
    expected = ["jaxserve", *["jaxserve-gateway"] * (folder == POOL), *["jaxserve-hosts"] * (folder in GROUPS)]
    assert sorted(each["metadata"]["name"] for each in of_kind(objects, "NetworkPolicy")) == expected


def test_gateway_and_scaler_lead_to_the_deployment() -> None:
    objects = render(POOL)
    (deployment,), (pool,) = of_kind(objects, "Deployment", "jaxserve"), of_kind(objects, "InferencePool")
    front = deployment["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= front["metadata"]["labels"].items()
    ports = {each["name"]: each["containerPort"] for each in front["spec"]["containers"][0]["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    (route,) = of_kind(objects, "HTTPRoute")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    reference = pool["spec"]["endpointPickerRef"]
    (service,) = of_kind(objects, "Service", reference["name"])
    assert reference["port"]["number"] in [each["port"] for each in service["spec"]["ports"]]
    (picker,) = of_kind(objects, "Deployment", reference["name"])
    assert service["spec"]["selector"].items() <= picker["spec"]["template"]["metadata"]["labels"].items()
    (config,) = of_kind(objects, "ConfigMap")
    plugins = {each["type"]: each for each in yaml.safe_load(config["data"]["config.yaml"])["plugins"]}
    assert plugins["metrics-data-source"]["parameters"] == {"port": ports["metrics"]}  # which takes no key
    (scaled,) = of_kind(objects, "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"] == {"name": deployment["metadata"]["name"]}
    assert "replicas" not in deployment["spec"]  # or each apply would set the number back


@pytest.mark.parametrize("folder", GROUPS)
def test_hosts_are_alike_and_start_and_fail_together(folder: str) -> None:
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
        (POOL, "nvidia.com/gpu", 1),
        ("overlays/h200-8", "nvidia.com/gpu", 1),
        ("overlays/tpu", "google.com/tpu", 1),
        ("overlays/tpu-v6e", "google.com/tpu", 1),
        ("overlays/a100-2x8", "nvidia.com/gpu", 2),
        ("overlays/tpu-slice", "google.com/tpu", 4),
    ],
)
def test_there_are_as_many_devices_as_the_layout_takes(folder: str, device: str, hosts: int) -> None:
    for group in of_kind(render(folder), "LeaderWorkerSet"):
        assert group["spec"]["leaderWorkerTemplate"]["size"] == hosts
    for container, _ in containers(render(folder)):
        given = dict(each.removeprefix("--").split("=") for each in container["args"] if "=" in each)
        given |= {name.removeprefix(settings.PREFIX).lower(): value for name, value in environment(container).items()}
        layout = int(given.get("tensor", 1)) * int(given.get("stages", 1))
        assert hosts * int(container["resources"]["limits"][device]) == layout
        kind = {"nvidia.com/gpu": "gpu", "google.com/tpu": "tpu"}[device]
        assert container["image"] == f"jaxserve:{kind}"
