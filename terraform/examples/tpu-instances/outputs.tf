output "launch" {
  description = "The recipe's `launch` section."
  value       = module.tpu_instances.launch
}

output "setup" {
  description = "Commands to run once after apply."
  value       = module.tpu_instances.setup
}
