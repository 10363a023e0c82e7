variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "region" {
  description = "The region, as us-east5."
  type        = string
  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "A region looks like us-east5; a zone has a letter at the end."
  }
}

variable "name" {
  description = "The name of the cluster. Two stacks in one project need two names."
  type        = string
  validation {
    condition     = can(regex("^[a-z]([-a-z0-9]{4,38}[a-z0-9])$", var.name))
    error_message = "A name is 6 to 40 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "labels" {
  description = "Labels for every resource that supports them, such as owner and run: cost reports can be split by them."
  type        = map(string)
  default     = {}
}

variable "network" {
  description = "The id of the network, from the module `network`."
  type        = string
}

variable "subnetwork" {
  description = "The id of the subnetwork, with secondary ranges called pods and services."
  type        = string
}

variable "service_account" {
  description = "The email of the service account of the nodes and the pods, from the module `service_account`."
  type        = string
}

variable "hours" {
  description = "Hours after its creation at which a node of a pool of accelerators is deleted. null: no limit; it is billed until it is destroyed."
  type        = number
  default     = 24
  validation {
    condition     = var.hours == null || try(var.hours > 0 && var.hours <= 2880, false)
    error_message = "A limit is more than 0 and at most 2880 hours (120 days), the limit of Compute Engine; null for none."
  }
}

variable "control_plane" {
  description = "IP range of the control plane: 16 addresses that nothing else uses."
  type        = string
  default     = "172.16.0.0/28"
  validation {
    condition     = can(cidrhost(var.control_plane, 0)) && endswith(var.control_plane, "/28")
    error_message = "A range of 16 addresses, as 172.16.0.0/28."
  }
}

variable "operators" {
  description = "IP ranges from which kubectl may be used, with keys that you choose: { office = \"203.0.113.0/24\" }."
  type        = map(string)
  validation {
    condition     = alltrue([for range in values(var.operators) : can(cidrhost(range, 0)) && range != "0.0.0.0/0"])
    error_message = "Each value is a range of IP addresses other than 0.0.0.0/0."
  }
}

variable "pods" {
  description = "The Kubernetes service account of the runs: `namespace` and `account` of the recipe's `launch` section."
  type        = object({ namespace = string, account = string })
  default     = { namespace = "default", account = "dtrain" }
}

variable "maintenance" {
  description = "When GKE may upgrade: a window of at least 4 hours, 48 hours in 32 days (RFC 3339 and RFC 5545)."
  type        = object({ start = string, end = string, recurrence = string })
  default = {
    start      = "2026-01-03T02:00:00Z"
    end        = "2026-01-03T10:00:00Z"
    recurrence = "FREQ=WEEKLY;BYDAY=SA,SU"
  }
}

variable "jobset" {
  description = "The version of JobSet."
  type        = string
  default     = "v0.12.0"
  validation {
    condition     = can(regex("^v[0-9]+[.][0-9]+[.][0-9]+$", var.jobset))
    error_message = "A version looks like v0.12.0."
  }
}

variable "protected" {
  description = "Whether `terraform destroy` refuses to delete the cluster."
  type        = bool
  default     = false
}

variable "pools" {
  description = <<-EOT
    Pools of accelerators, with keys that you choose. A TPU slice: machine, hosts, topology; slices: how many, each in its own
    pool.
    GPUs: machine, hosts, gpu.
  EOT
  type = map(object({
    zone        = string
    machine     = string
    hosts       = number
    slices      = optional(number, 1)
    topology    = optional(string)
    gpu         = optional(object({ type = string, count = number }))
    spot        = optional(bool, false)
    reservation = optional(string)
  }))
  validation {
    condition     = length(var.pools) > 0
    error_message = "Define at least one pool."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : (pool.topology == null) != (pool.gpu == null)])
    error_message = "A pool has either a topology (TPUs) or a gpu."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : pool.topology == null || can(regex("^[0-9]+x[0-9]+(x[0-9]+)?$", pool.topology))])
    error_message = "A topology looks like 4x4, or 4x4x8."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : !(startswith(pool.machine, "tpu7x") && pool.hosts > 1)])
    error_message = "Slices of several tpu7x hosts need a workload policy, which Terraform's node pool cannot set: create that pool with gcloud."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : pool.hosts >= 1 && pool.slices >= 1])
    error_message = "A pool has at least one host and one slice."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : !(pool.spot && pool.reservation != null)])
    error_message = "A reservation is not spot."
  }
}
