"""A small Google Cloud behind the fake providers: what exists is in one JSON file, which a test may change.

The kit's providers remember nothing: they return every state unchanged and show every change as an update in place.
With this file in between, a machine that is gone is gone at the next refresh, a group lists the hosts that it has, an
argument that cannot change replaces the resource, and each host remembers with what it booted.

    python cloud.py google_stub.py SCHEMA.json CLOUD.json -- terraform plan
"""

import copy
import hashlib
import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import Any

UPDATED = {
    "google_compute_instance": {
        *("allow_stopping_for_update", "can_ip_forward", "deletion_protection", "desired_status", "labels"),
        *("machine_type", "metadata", "min_cpu_platform", "network_interface", "resource_policies", "service_account"),
        *("shielded_instance_config", "tags"),
    },
    "google_compute_instance_group_manager": {
        *("description", "instance_lifecycle_policy", "list_managed_instances_results", "named_port"),
        *("resource_policies", "standby_policy", "target_pools", "target_size", "target_size_policy", "update_policy"),
        *("version", "wait_for_instances", "wait_for_instances_status"),
    },
    "google_compute_instance_template": set[str](),
    "google_container_node_pool": {
        *("autoscaling", "management", "node_count", "node_locations", "upgrade_settings"),
        *("version", "initial_node_count"),
    },
    "google_project_iam_custom_role": {"description", "permissions", "stage", "title"},
    "google_storage_bucket_object": {"event_based_hold", "source", "temporary_hold"},
    "google_tpu_v2_vm": {"data_disks", "description", "labels", "metadata", "tags"},
}
"""The arguments that version 7 of the provider changes in place; each other argument of these types replaces the
resource (`ForceNew`, or `customdiff.ForceNewIf` for a startup script). Blocks count as a whole: of `scheduling` and
`node_config` only the limit on the run time is changed here, which replaces. Of other types only NAMES replace."""

EVERYWHERE = {"deletion_policy", "effective_labels", "terraform_labels", "timeouts"}
NAMES = ["name", "account_id", "role_id", "repository_id", "service", "project", "region", "zone", "location"]
NAMES += ["cluster", "bucket", "role", "member"]
WORKERS = 4
"""Hosts of a TPU node: v6e-16 and v5p-32 have four."""


def key(kind: str, values: dict[str, Any]) -> str:
    """What identifies a resource in a project."""
    return "/".join([kind, *(str(values[name]) for name in NAMES if values.get(name))])


class Project:
    """What exists: resources by id, each with its values and its hosts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = json.loads(path.read_text()) if path.exists() else {"serial": 0, "live": {}}
        self.live: dict[str, dict[str, Any]] = self.data["live"]

    def save(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1))

    def serial(self) -> int:
        self.data["serial"] += 1
        return self.data["serial"]

    def host(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """A host that boots now; what it read at boot stays as it is."""
        number = self.serial()
        return {"boot": number, "name": name, "address": f"10.0.0.{number}", "with": copy.deepcopy(values)}

    def create(self, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        """ValueError if another resource has the name."""
        if kind == "google_compute_instance_template" and values.get("name_prefix"):
            values["name"] = f"{values['name_prefix']}{self.serial()}"
        values["id"] = key(kind, values)
        there = self.live.get(values["id"])
        if there and not kind.endswith(("_iam_member", "_project_service")):
            raise ValueError(f"googleapi: Error 409: {values['id']} already exists, alreadyExists")
        resource = {"type": kind, "values": values, "hosts": []}
        if kind == "google_compute_instance":
            resource["hosts"] = [self.host(values["name"], values)]
        if kind == "google_tpu_v2_vm":
            resource["hosts"] = [self.host(f"{values['name']}-w{worker}", values) for worker in range(WORKERS)]
        if kind == "google_service_account":
            values["email"] = f"{values['account_id']}@{values['project']}.iam.gserviceaccount.com"
        if kind == "google_storage_bucket_object":
            resource["sha256"] = hashlib.sha256(Path(values["source"]).read_bytes()).hexdigest()
        if kind == "google_compute_instance_group_manager":
            values["instance_group"] = f"instanceGroups/{values['name']}"
        self.live[values["id"]] = resource
        self.resize(resource)
        return self.read(resource)

    def update(self, resource: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Hosts that run do not see it."""
        resource["values"] = values
        self.resize(resource)
        return self.read(resource)

    def delete(self, resource: dict[str, Any]) -> None:
        """ValueError if another resource needs it; what its arguments protect stays."""
        values = resource["values"]
        users = [
            one["values"]["name"]
            for one in self.live.values()
            if one["type"] == "google_compute_instance_group_manager"
            for version in one["values"]["version"]
            if version["instance_template"] == values["id"]
        ]
        if users:
            raise ValueError(f"googleapi: Error 400: {values['id']} is already being used by {users[0]}")
        if values.get("deletion_protection"):
            raise ValueError(f"{values['id']}: deletion_protection is set")
        if values.get("deletion_policy") != "ABANDON" and values.get("disable_on_destroy") is not False:
            del self.live[values["id"]]

    def resize(self, resource: dict[str, Any]) -> None:
        """A group creates hosts when its size grows, and repairs none: its policy is DO_NOTHING."""
        if resource["type"] != "google_compute_instance_group_manager":
            return
        values, hosts = resource["values"], resource["hosts"]
        size, before = values["target_size"], resource.get("size", 0)
        template = self.live[values["version"][0]["instance_template"]]["values"]
        for _ in range(size - before):
            hosts.append(self.host(f"{values['base_instance_name']}-{self.serial():04d}", template))
        del hosts[len(hosts) - max(0, before - size) :]
        resource["size"] = size

    def read(self, resource: dict[str, Any]) -> dict[str, Any]:
        """Its values, with what depends on its hosts."""
        values, hosts = resource["values"], resource["hosts"]
        if resource["type"] == "google_tpu_v2_vm":
            address = [{"access_config": [], "ip_address": host["address"], "port": 8470} for host in hosts]
            values["network_endpoints"] = address
        if resource["type"] == "google_compute_instance":
            values["network_interface"][0]["network_ip"] = hosts[0]["address"]
        if resource["type"] == "google_container_node_pool" and values["autoscaling"]:
            values["node_count"] = len(hosts)
        return values

    def hosts(self) -> dict[str, dict[str, Any]]:
        """All hosts that exist, by name."""
        return {host["name"]: host for one in self.live.values() for host in one["hosts"]}

    def look_up(self, kind: str, values: dict[str, Any]) -> None:
        """Fill in the values of a data source; LookupError if there is no such thing."""
        if kind == "google_project":
            values["number"] = "123456789"
        if kind == "google_compute_instance":
            host = self.hosts().get(values["name"])
            if not host:
                raise LookupError(f"googleapi: Error 404: instance {values['name']} was not found, notFound")
            values["network_interface"] = [{"network_ip": host["address"]}]
        if kind == "google_compute_instance_group":
            names = values.get("self_link"), f"instanceGroups/{values.get('name')}"
            groups = [one for one in self.live.values() if one["values"].get("instance_group") in names]
            if not groups:
                raise LookupError(f"googleapi: Error 404: group {names[0] or names[1]} was not found, notFound")
            zone = groups[0]["values"].get("zone")
            values["instances"] = [f"zones/{zone}/instances/{host['name']}" for host in groups[0]["hosts"]]


def replacing(block: dict[str, Any], kind: str, prior: dict[str, Any], planned: dict[str, Any]) -> list[str]:
    """The arguments whose change replaces the resource."""
    computed = {
        name
        for name, one in block["attributes"].items()
        if one.get("computed") and not one.get("optional") and not one.get("required")
    }
    changed = {name for name in planned if planned[name] != prior.get(name)} - computed - EVERYWHERE
    if kind.endswith("_iam_member"):
        return sorted(changed)
    return sorted(changed - UPDATED[kind] if kind in UPDATED else changed.intersection(NAMES))


def serve(stub: Any, path: Path) -> type:
    """The kit's handler, with a project."""
    lock, project = threading.Lock(), Project(path)

    class Handler(stub.Handler):
        def ReadResource(self, q: dict[int, list[bytes]]) -> bytes:
            with lock:
                there = project.live.get(stub.dyn(q[2][0])["id"])
                return stub.M(1, stub.endyn(project.read(there) if there else None))

        def PlanResourceChange(self, q: dict[int, list[bytes]]) -> bytes:
            kind, prior, proposed = q[1][0].decode(), stub.dyn(q[2][0]), stub.dyn(q[3][0])
            if prior is None or proposed is None:
                return super().PlanResourceChange(q)
            names = replacing(self.blk("resource_schemas", kind), kind, prior, proposed)
            paths = b"".join(stub.M(2, stub.M(1, stub.F(1, name))) for name in names)
            return stub.M(1, q[3][0]) + paths + stub.F(5, True)

        def ApplyResourceChange(self, q: dict[int, list[bytes]]) -> bytes:
            kind, prior = q[1][0].decode(), stub.dyn(q[2][0])
            planned = stub.dyn(stub.parse(super().ApplyResourceChange(q))[1][0])
            with lock:
                there = project.live.get(prior["id"]) if prior else None
                try:
                    if planned is None and there:
                        project.delete(there)
                    elif planned is not None:
                        planned = project.update(there, planned) if there else project.create(kind, planned)
                except ValueError as error:
                    return stub.M(1, stub.endyn(prior)) + stub.M(3, stub.diag(1, str(error))) + stub.F(4, True)
                project.save()
                return stub.M(1, stub.endyn(planned)) + stub.F(4, True)

        def ReadDataSource(self, q: dict[int, list[bytes]]) -> bytes:
            kind, values = q[1][0].decode(), stub.dyn(stub.parse(super().ReadDataSource(q))[1][0])
            with lock:
                try:
                    project.look_up(kind, values)
                except LookupError as error:
                    return stub.M(2, stub.diag(1, str(error)))
            return stub.M(1, stub.endyn(values))

    return Handler


def main() -> None:
    kit, schema, path, *command = sys.argv[1:]
    found = importlib.util.spec_from_file_location("google_stub", kit)
    stub = importlib.util.module_from_spec(found)
    found.loader.exec_module(stub)
    stub.Handler = serve(stub, Path(path))
    sys.argv = [kit, schema, *command]
    stub.main()


if __name__ == "__main__":
    main()
