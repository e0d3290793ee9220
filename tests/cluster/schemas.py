"""The schemas of Kubernetes and KubeRay, to check manifests with; an unknown field is refused.

`kubernetes-1.37.json.gz` is the part of Kubernetes' published schema that the manifests need (Apache-2.0), without its
descriptions, as in the package kubernetes-validate 1.37.0, in its strict form; to make it again, run this file:

    pip download --no-deps kubernetes-validate==1.37.0
    python tests/cluster/schemas.py kubernetes_validate-1.37.0-py3-none-any.whl

`kuberay-1.6.2.json` lists the fields of KubeRay's RayCluster and RayJob and their types, from the reference of its
interface (release 1.6.2, ray.io/v1); `!` marks a required field, `[]` a list. A name with a capital is another kind,
of the same file or of Kubernetes.
"""

import gzip
import json
import sys
import zipfile
from pathlib import Path

import jsonschema

HERE = Path(__file__).parent
KUBERNETES = HERE / "kubernetes-1.37.json.gz"
SOURCE = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
CORE, META = "io.k8s.api.core.v1.", "io.k8s.apimachinery.pkg.apis.meta.v1."
KINDS = {  # by apiVersion and kind
    ("v1", "PersistentVolumeClaim"): f"{CORE}PersistentVolumeClaim",
    ("v1", "Secret"): f"{CORE}Secret",
    ("v1", "Service"): f"{CORE}Service",
    ("apps/v1", "StatefulSet"): "io.k8s.api.apps.v1.StatefulSet",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
    ("ray.io/v1", "RayCluster"): "RayCluster",
    ("ray.io/v1", "RayJob"): "RayJob",
}
SIMPLE = {
    "strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "positive": {"type": "integer", "minimum": 1},
    **{name: {"type": name} for name in ("string", "boolean", "number")},
    "integer": {"type": "integer", "minimum": 0},
}


def check(manifest):
    """Raises jsonschema.ValidationError, which names the place, if Kubernetes or its operator would refuse it."""
    kind = KINDS[manifest["apiVersion"], manifest["kind"]]
    schema = {"$ref": f"#/$defs/{kind}", "$defs": {**_kubernetes(), **_kuberay()}}
    jsonschema.Draft202012Validator(schema).validate(manifest)


def _kubernetes():
    return json.loads(gzip.decompress(KUBERNETES.read_bytes()))


def _kuberay():
    kinds = json.loads((HERE / "kuberay-1.6.2.json").read_text())

    def schema(given):
        if isinstance(given, list):
            return {"enum": given}
        if given.endswith("[]"):
            return {"type": "array", "items": schema(given.removesuffix("[]"))}
        if given in SIMPLE:
            return SIMPLE[given]
        of_kubernetes = (META if given == "ObjectMeta" else CORE) + given
        return {"$ref": f"#/$defs/{given if given in kinds else of_kubernetes}"}

    return {
        kind: {
            "type": "object",
            "properties": {name.rstrip("!"): schema(given) for name, given in fields.items()},
            "required": [name.rstrip("!") for name in fields if name.endswith("!")],
            "additionalProperties": False,
        }
        for kind, fields in kinds.items()
    }


def pack(wheel):
    """Write `KUBERNETES` from the wheel with the whole schema: the kinds above, and all kinds that they refer to."""
    whole = json.loads(zipfile.ZipFile(wheel).read(SOURCE))["$defs"]
    used = {"EnvVar", "EnvFromSource", "EnvVarSource", "PodTemplateSpec", "ResourceRequirements", "SecurityContext"}
    todo = [kind for kind in KINDS.values() if kind in whole] + [CORE + kind for kind in used | {"VolumeMount"}]
    kept = {}
    while todo:
        kind = todo.pop()
        if kind not in kept:
            kept[kind] = _without_descriptions(whole[kind])
            todo += [line.split('"')[0] for line in json.dumps(kept[kind]).split('"#/$defs/')[1:]]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    KUBERNETES.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _without_descriptions(node, names_are_fields=False):
    if isinstance(node, list):
        return [_without_descriptions(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_descriptions(value, key == "properties" and not names_are_fields)
        for key, value in node.items()
        if names_are_fields or (key != "description" and not key.startswith("x-"))
    }


if __name__ == "__main__":
    pack(sys.argv[1])
