output "group" {
  description = "The group's name."
  value       = google_compute_instance_group_manager.slice.name
}

output "hosts" {
  description = "The command that lists its hosts, whose names the group makes up: `launch.hosts` of kind ssh."
  value       = "gcloud compute instance-groups managed list-instances ${google_compute_instance_group_manager.slice.name} --project ${var.project} --zone ${var.zone} --format 'value(name)'"
}
