variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "zone" {
  description = "The zone of the accelerators, as us-east5-b."
  type        = string
  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+-[a-z]$", var.zone))
    error_message = "A zone looks like us-east5-b; a region has no letter at the end."
  }
}

variable "name" {
  description = "The name of the TPU node. Two stacks in one project need two names."
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
  description = "The id of the subnetwork."
  type        = string
}

variable "service_account" {
  description = "The email of the service account of the machines, from the module `service_account`."
  type        = string
}

variable "bucket" {
  description = "The bucket that is mounted at /mnt/dtrain, without gs://."
  type        = string
}

variable "wheel" {
  description = "The wheel of dtrain, as gs://BUCKET/OBJECT.whl."
  type        = string
}

variable "lock" {
  description = "The lock file: all packages that the wheel needs, with hashes, as gs://BUCKET/OBJECT."
  type        = string
}

variable "hours" {
  description = "Hours after the first boot of a host at which the node is deleted. null: no limit; it is billed until it is destroyed."
  type        = number
  default     = 24
  validation {
    condition     = var.hours == null || try(var.hours > 0 && var.hours <= 2880, false)
    error_message = "A limit is more than 0 and at most 2880 hours (120 days), the limit of Compute Engine; null for none."
  }
}

variable "user" {
  description = "The Linux user to log in as."
  type        = string
  validation {
    condition     = can(regex("^[a-z_][a-z0-9_-]{0,31}$", var.user))
    error_message = "A user is lower-case letters, digits, hyphens and underscores."
  }
}

variable "accelerator_type" {
  description = "The slice, as the TPU API names it: v5litepod-16, v6e-8."
  type        = string
  validation {
    condition     = can(regex("^(v4|v5litepod|v5p|v6e)-[0-9]+$", var.accelerator_type))
    error_message = "A slice looks like v5litepod-16; the TPU API has v4, v5litepod, v5p and v6e. TPU7x: the modules tpu_instances and gke."
  }
}

variable "runtime_version" {
  description = "The system image of the TPU VMs; by default the usual one for the slice."
  type        = string
  default     = null
}

variable "spot" {
  description = "Whether the machines are spot: cheaper, and reclaimed at any time."
  type        = bool
  default     = false
}

variable "reserved" {
  description = "Whether the machines come from the project's reservation."
  type        = bool
  default     = false
  validation {
    condition     = !(var.reserved && var.spot)
    error_message = "Spot and reserved are two kinds of capacity: choose one."
  }
}
