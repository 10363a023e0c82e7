output "script" {
  description = "The startup script."
  value       = local.script
}

output "launch" {
  description = "What the script creates, as keys of the recipe's `launch` section, and a limit that ends the run before the machine."
  value = {
    runs   = "/mnt/dtrain"
    python = "/opt/dtrain/bin/python"
    ready  = "/var/lib/dtrain/ready"
    wheel  = var.wheel
    hours  = var.hours == null ? null : var.hours - min(0.5, var.hours / 4)
  }
}

output "reach" {
  description = "A shell function, reach PROXY HOST: waits until ssh to a booting host succeeds, and records its host key."
  value = join(" ", [
    "reach() { for try in 1 2 3 4 5 6 7 8 9 10; do",
    "ssh -n -i ~/.ssh/google_compute_engine -o StrictHostKeyChecking=accept-new -o ProxyCommand=\"$1\" \"$2\" true && return;",
    "sleep 20; done; return 1; }",
  ])
}
