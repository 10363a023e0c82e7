variable "project" {
  description = "The Google Cloud project."
  type        = string
}

variable "bucket" {
  description = "A name for the bucket, unique in the world."
  type        = string
}

variable "region" {
  description = "Of all of it."
  type        = string
  default     = "us-east5"
}

variable "zone" {
  description = "Of the chips, in the region."
  type        = string
  default     = "us-east5-b"
}

variable "on" {
  description = "The slice, as dtrain calls it."
  type        = string
  default     = "v6e-16"
}

variable "spot" {
  description = "Whether it is spot."
  type        = bool
  default     = true
}

variable "kind" {
  description = "How the chips are asked for: queued, or group for v5p, v6e and TPU7x."
  type        = string
  default     = "queued"
  validation {
    condition     = contains(["queued", "group"], var.kind)
    error_message = "The kind is queued or group."
  }
}

variable "secrets" {
  description = "Secrets of Secret Manager that the runs read: those of `launch.environment`."
  type        = list(string)
  default     = []
}
