variable "bucket" {
  description = "The bucket to mount, without gs://."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][-_a-z0-9]{1,61}[a-z0-9]$", var.bucket))
    error_message = "A bucket is 3 to 63 lower-case letters, digits, hyphens and underscores, without gs://."
  }
}

variable "wheel" {
  description = "The wheel of dtrain, as gs://BUCKET/OBJECT.whl."
  type        = string
  validation {
    condition     = can(regex("^gs://[a-z0-9][-_.a-z0-9]+/[-A-Za-z0-9_./+]+[.]whl$", var.wheel))
    error_message = "A wheel is gs://BUCKET/OBJECT.whl."
  }
}

variable "lock" {
  description = "The lock file: all packages that the wheel needs, with hashes, as gs://BUCKET/OBJECT."
  type        = string
  validation {
    condition     = can(regex("^gs://[a-z0-9][-_.a-z0-9]+/[-A-Za-z0-9_./+]+$", var.lock))
    error_message = "A lock file is gs://BUCKET/OBJECT."
  }
}

variable "python" {
  description = "The version of Python, that of the lock file."
  type        = string
  default     = "3.12"
  validation {
    condition     = can(regex("^3[.][0-9]+([.][0-9]+)?$", var.python))
    error_message = "A version looks like 3.12."
  }
}

variable "tpu" {
  description = "The TPU node that a timer deletes after `hours`, as projects/PROJECT/locations/ZONE/nodes/NAME; null for instances, which Compute Engine deletes."
  type        = string
  default     = null
  validation {
    condition     = var.tpu == null || can(regex("^projects/[-a-z0-9]+/locations/[-a-z0-9]+/nodes/[-a-z0-9]+$", var.tpu))
    error_message = "A node is projects/PROJECT/locations/ZONE/nodes/NAME."
  }
}

variable "hours" {
  description = "Hours after which the machine is deleted, by the timer if it is a TPU node; null for no limit."
  type        = number
  default     = null
}
