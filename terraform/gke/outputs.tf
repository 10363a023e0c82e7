output "cluster" {
  description = "The cluster's name."
  value       = google_container_cluster.this.name
}

output "credentials" {
  description = "The command that lets kubectl reach it."
  value       = "gcloud container clusters get-credentials ${google_container_cluster.this.name} --region ${var.region} --project ${var.project}"
}

output "context" {
  description = "What kubectl calls it then, as `launch: {context: ...}` takes it."
  value       = "gke_${var.project}_${var.region}_${google_container_cluster.this.name}"
}
