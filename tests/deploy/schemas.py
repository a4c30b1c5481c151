"""What the custom resources that we use may hold: the part of the published definitions that our files touch.

LeaderWorkerSet: config/crd/bases of kubernetes-sigs/lws. PodMonitor: example/prometheus-operator-crd of
prometheus-operator. InferencePool: config/crd/bases of kubernetes-sigs/gateway-api-inference-extension. HTTPRoute:
config/crd/standard of kubernetes-sigs/gateway-api. ScaledObject: config/crd/bases of kedacore/keda. All as of August
2026. Pods within them are Kubernetes' own.
"""

from __future__ import annotations

from typing import Any

STRINGS = {"*": str}
SCALING = {
    "stabilizationWindowSeconds": int,
    "policies": [{"!type": ("Pods", "Percent"), "!value": int, "!periodSeconds": int}],
    "selectPolicy": ("Max", "Min", "Disabled"),
}
TEMPLATE = {"metadata": {"labels": STRINGS, "annotations": STRINGS}, "spec": object}
METADATA = {"name": str, "labels": STRINGS, "annotations": STRINGS}

# A dict is an object with these fields, "*" for any name, "!" before those that must be there; a list of one an array
# of it; a tuple what a value may be; a type what it is of.
OF_OTHERS: dict[str, Any] = {
    "LeaderWorkerSet": {
        "!apiVersion": ("leaderworkerset.x-k8s.io/v1",),
        "!kind": str,
        "!metadata": METADATA,
        "!spec": {
            "replicas": int,
            "startupPolicy": ("LeaderCreated", "LeaderReady"),
            "rolloutStrategy": {
                "!type": ("RollingUpdate",),
                "rollingUpdateConfiguration": {"maxSurge": int, "maxUnavailable": int, "partition": int},
            },
            "networkConfig": {"!subdomainPolicy": ("Shared", "UniquePerReplica")},
            "!leaderWorkerTemplate": {
                "size": int,
                "restartPolicy": ("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
                "leaderTemplate": TEMPLATE,
                "!workerTemplate": TEMPLATE,
            },
        },
    },
    "PodMonitor": {
        "!apiVersion": ("monitoring.coreos.com/v1",),
        "!kind": str,
        "!metadata": METADATA,
        "!spec": {
            "!selector": {"matchLabels": STRINGS},
            "podMetricsEndpoints": [{"port": str, "path": str, "interval": str, "scheme": ("http", "https")}],
            "podTargetLabels": [str],
        },
    },
    "InferencePool": {
        "!apiVersion": ("inference.networking.k8s.io/v1",),
        "!kind": str,
        "!metadata": METADATA,
        "!spec": {
            "!selector": {"!matchLabels": STRINGS},
            "!targetPorts": [{"!number": int}],
            "appProtocol": ("http", "kubernetes.io/h2c"),
            "endpointPickerRef": {
                "group": str,
                "kind": str,
                "!name": str,
                "!port": {"!number": int},
                "failureMode": ("FailOpen", "FailClose"),
            },
        },
    },
    "HTTPRoute": {
        "!apiVersion": ("gateway.networking.k8s.io/v1",),
        "!kind": str,
        "!metadata": METADATA,
        "!spec": {
            "parentRefs": [{"!name": str, "namespace": str, "sectionName": str}],
            "rules": [
                {
                    "matches": [{"path": {"type": ("Exact", "PathPrefix", "RegularExpression"), "value": str}}],
                    "backendRefs": [{"group": str, "kind": str, "!name": str, "port": int}],
                    "timeouts": {"request": str, "backendRequest": str},
                }
            ],
        },
    },
    "ScaledObject": {
        "!apiVersion": ("keda.sh/v1alpha1",),
        "!kind": str,
        "!metadata": METADATA,
        "!spec": {
            "!scaleTargetRef": {"apiVersion": str, "kind": str, "!name": str},
            "minReplicaCount": int,
            "maxReplicaCount": int,
            "pollingInterval": int,
            "fallback": {
                "!failureThreshold": int,
                "!replicas": int,
                "behavior": ("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
            },
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": SCALING, "scaleDown": SCALING}}},
            "!triggers": [{"!type": str, "metricType": ("AverageValue", "Value", "Utilization"), "!metadata": STRINGS}],
        },
    },
}
VERSIONS = {
    "Service": "v1",
    "ConfigMap": "v1",
    "ServiceAccount": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
}


def check(each: dict[str, Any]) -> None:
    """Holds a custom resource to what is allowed, and any other to its name and version."""
    kind = each["kind"]
    if kind in OF_OTHERS:
        _check(each, OF_OTHERS[kind], kind)
    else:
        assert each["apiVersion"] == VERSIONS[kind]
        assert each["metadata"]["name"].startswith("jaxserve")


def _check(value: Any, allowed: Any, where: str) -> None:
    if isinstance(allowed, tuple):
        assert value in allowed, f"{where} is {value!r}, which is none of {allowed}"
    elif isinstance(allowed, list):
        assert isinstance(value, list), f"{where} is no list"
        for index, each in enumerate(value):
            _check(each, allowed[0], f"{where}[{index}]")
    elif isinstance(allowed, dict):
        assert isinstance(value, dict), f"{where} is no object"
        names = {name.removeprefix("!"): inner for name, inner in allowed.items()}
        for name, inner in value.items():
            assert "*" in names or name in names, f"{where}.{name} is unknown"
            _check(inner, names.get(name, names.get("*")), f"{where}.{name}")
        missing = {name[1:] for name in allowed if name.startswith("!")} - set(value)
        assert not missing, f"{where} has no {missing}"
    else:
        assert isinstance(value, allowed), f"{where} is {value!r}, no {allowed.__name__}"
