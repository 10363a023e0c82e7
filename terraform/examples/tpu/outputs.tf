output "launch" {
  description = "The recipe's `launch` section."
  value       = module.tpu.launch
}

output "setup" {
  description = "Commands to run once after apply."
  value       = module.tpu.setup
}
