output "hosts" {
  description = "The addresses of its workers in the network, by rank: `launch.hosts` of kind ssh."
  value       = google_tpu_v2_vm.this.network_endpoints[*].ip_address
}
