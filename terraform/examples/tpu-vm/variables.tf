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

variable "accelerator_type" {
  description = "The slice, as the TPU API calls it."
  type        = string
  default     = "v6e-8"
}
