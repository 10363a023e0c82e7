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
  description = "The name of the group and the first part of the names of its hosts. Two stacks in one project need two names."
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
  description = "The machine type of a host: ct6e-standard-4t, ct5p-hightpu-4t, tpu7x-standard-4t."
  type        = string
  validation {
    condition     = can(regex("^(ct6e-standard-[148]t|ct5p-hightpu-[124]t|tpu7x-standard-[14]t)$", var.machine))
    error_message = "Instances are v5p, v6e and TPU7x: ct5p-hightpu-4t, ct6e-standard-4t, tpu7x-standard-4t."
  }
}

variable "hosts" {
  description = "The number of hosts of the slice."
  type        = number
  validation {
    condition     = var.hosts >= 1 && floor(var.hosts) == var.hosts
    error_message = "A slice has at least one host."
  }
}

variable "topology" {
  description = "The topology of the chips of several hosts, as 4x4; null for one host."
  type        = string
  default     = null
  validation {
    condition     = (var.topology == null) == (var.hosts == 1)
    error_message = "A slice of several hosts needs a topology, as 4x4; one host has none."
  }
  validation {
    condition = var.topology == null || try(
      var.hosts * tonumber(regex("([0-9]+)t$", var.machine)[0]) ==
      tonumber(split("x", var.topology)[0]) * tonumber(split("x", var.topology)[1]) * tonumber(try(split("x", var.topology)[2], 1)),
      false,
    )
    error_message = "The chips of all hosts must fill the topology: 4x4 is 4 hosts of ct6e-standard-4t."
  }
}

variable "reservation" {
  description = "The reservation to use, by name."
  type        = string
  default     = null
  validation {
    condition     = var.hosts == 1 || var.reservation != null || var.flex_start
    error_message = "Several hosts need a reservation or flex_start, which create them together. For spot and on demand use the module tpu or gke."
  }
}

variable "flex_start" {
  description = "Whether to wait for capacity of flex-start, which lasts 7 days at most."
  type        = bool
  default     = false
  validation {
    condition     = !var.flex_start || try(var.hours <= 168, false)
    error_message = "Flex-start lasts 168 hours at most: set hours."
  }
}

variable "spot" {
  description = "Whether the one host is spot: cheaper, and reclaimed at any time."
  type        = bool
  default     = false
  validation {
    condition     = length([for chosen in [var.flex_start, var.spot, var.reservation != null] : chosen if chosen]) <= 1
    error_message = "Spot, flex_start and reservation are kinds of capacity: choose one."
  }
}

variable "wait" {
  description = "Minutes that `apply` waits for capacity. After that the request stays open: `terraform destroy` withdraws it."
  type        = number
  default     = 60
}

variable "image" {
  description = "The image; required for TPU7x, see the list of TPU images in the documentation of Compute Engine."
  type        = string
  default     = null
  validation {
    condition     = var.image != null || !startswith(var.machine, "tpu7x")
    error_message = "TPU7x needs an image of its own: image = \"projects/ubuntu-os-accelerator-images/global/images/family/...\"."
  }
}
