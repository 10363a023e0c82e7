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
  description = "The first part of the names of the hosts. Two stacks in one project need two names."
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
  description = "Hours after its start at which Compute Engine deletes a host. null: no limit; it is billed until it is destroyed."
  type        = number
  default     = 24
  validation {
    condition     = var.hours == null || try(var.hours > 0 && var.hours <= 2880, false)
    error_message = "A limit is more than 0 and at most 2880 hours (120 days), the limit of Compute Engine; null for none."
  }
}

variable "user" {
  description = "The OS Login user to log in as: gcloud compute os-login describe-profile --format 'value(posixAccounts[0].username)'."
  type        = string
  validation {
    condition     = can(regex("^[a-z_][a-z0-9_-]{0,31}$", var.user))
    error_message = "A user is lower-case letters, digits, hyphens and underscores."
  }
}

variable "machine" {
  description = "The machine type of a host."
  type        = string
  default     = "a3-highgpu-8g"
  validation {
    condition     = can(regex("^(a2-highgpu-[1248]g|a2-megagpu-16g|a2-ultragpu-[1248]g|a3-highgpu-[1248]g|a3-(edge|mega|ultra)gpu-8g|a4-highgpu-8g)$", var.machine))
    error_message = "A host with GPUs is a2-highgpu-8g, a2-ultragpu-8g, a3-highgpu-8g, a3-megagpu-8g, a3-ultragpu-8g or a4-highgpu-8g, or a smaller one of a2 or a3-highgpu."
  }
}

variable "hosts" {
  description = "The number of hosts."
  type        = number
  default     = 1
  validation {
    condition     = var.hosts >= 1 && floor(var.hosts) == var.hosts
    error_message = "There must be at least one host."
  }
}

variable "spot" {
  description = "Whether the machines are spot: cheaper, and reclaimed at any time."
  type        = bool
  default     = false
}

variable "reservation" {
  description = "The reservation to use, by name."
  type        = string
  default     = null
  validation {
    condition     = var.reservation == null || !var.spot
    error_message = "Spot and a reservation are two kinds of capacity: choose one."
  }
}

variable "image" {
  description = "The image, with the NVIDIA driver (580 or newer for CUDA 13)."
  type        = string
  default     = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2404-amd64-with-nvidia-580"
}
