//! Device properties for which plans are built.
//!
//! cuDNN builds plans from a JSON object with 26 properties, so that no device is needed. The three objects
//! here describe the devices that plans are checked for; a real device reports its own.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType,
};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::descriptor::Descriptor;
use super::library::{Error, Library, Result};

/// Properties that differ between equal devices.
const OF_ONE_DEVICE: [&str; 3] = ["pciDeviceId", "cudaDeviceId", "driverVer"];

/// Device properties, as cuDNN reads and writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    properties: Map<String, Value>,
}

impl DeviceProperties {
    /// Returns the H200 properties.
    #[must_use]
    pub fn h200() -> Self {
        Self::from_model(json!({
            "deviceName": "NVIDIA H200",
            "deviceVer": 900,
            "multiProcessorCount": 132,
            "maxSharedMemoryPerBlockOptin": 232_448,
            "totalGlobalMem": 150_000_000_000_u64,
            "memoryBusWidth": 6144,
            "l2CacheSize": 62_914_560,
        }))
    }

    /// Returns the properties for an A100 with 80 GB.
    #[must_use]
    pub fn a100() -> Self {
        Self::from_model(json!({
            "deviceName": "NVIDIA A100-SXM4-80GB",
            "deviceVer": 800,
            "multiProcessorCount": 108,
            "maxSharedMemoryPerBlockOptin": 166_912,
            "totalGlobalMem": 85_000_000_000_u64,
            "memoryBusWidth": 5120,
            "l2CacheSize": 41_943_040,
        }))
    }

    /// Returns the B200 properties.
    #[must_use]
    pub fn b200() -> Self {
        Self::from_model(json!({
            "deviceName": "NVIDIA B200",
            "deviceVer": 1000,
            "multiProcessorCount": 148,
            "maxSharedMemoryPerBlockOptin": 232_448,
            "totalGlobalMem": 190_000_000_000_u64,
            "memoryBusWidth": 8192,
            "l2CacheSize": 132_644_864,
        }))
    }

    /// Reads the properties of a device on this machine from cuDNN.
    ///
    /// - `ordinal`: device index among the devices that CUDA shows this process
    ///
    /// # Errors
    /// [`Error::Refused`] without such a device, [`Error::Properties`].
    pub fn from_device(library: &Arc<Library>, ordinal: i32) -> Result<Self> {
        let mut descriptor = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?;
        descriptor.set(Attribute::CUDNN_ATTR_DEVICEPROP_DEVICE_ID, &[ordinal])?;
        let descriptor = descriptor.finalize()?;
        Self::from_json(&descriptor.text(Attribute::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION)?)
    }

    /// Reads properties from a JSON object.
    ///
    /// # Errors
    /// [`Error::Properties`].
    pub fn from_json(text: &str) -> Result<Self> {
        let properties = serde_json::from_str(text).map_err(|source| Error::Properties { source })?;
        Ok(Self { properties })
    }

    /// Returns the properties as a JSON object.
    #[must_use]
    pub fn to_json(&self) -> String {
        Value::Object(self.properties.clone()).to_string()
    }

    /// Returns the major compute capability: 8 for Ampere, 9 for Hopper, 10 for Blackwell; 0 if missing.
    #[must_use]
    pub fn major(&self) -> u32 {
        self.properties.get("deviceVer").and_then(Value::as_u64).map_or(0, |version| version as u32 / 100)
    }

    /// Returns a digest over the properties that plans depend on, in hexadecimal: equal devices have equal
    /// digests.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut properties = self.properties.clone();
        properties.retain(|name, _| !OF_ONE_DEVICE.contains(&name.as_str()));
        properties.sort_keys();
        let digest = Sha256::digest(Value::Object(properties).to_string());
        let first = digest.iter().take(8).fold(0, |number, &byte| number << 8 | u64::from(byte));
        format!("{first:016x}")
    }

    /// Returns a descriptor for the properties.
    pub(super) fn descriptor(&self, library: &Arc<Library>) -> Result<Arc<Descriptor>> {
        let mut text = self.to_json().into_bytes();
        text.push(0);
        let mut descriptor = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?;
        descriptor.set(Attribute::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, &text)?;
        descriptor.finalize()
    }

    /// Adds the properties that all models share.
    fn from_model(model: Value) -> Self {
        let common = json!({
            "regsPerBlock": 65_536,
            "smCountOrigin": 0,
            "maxBlockSize": [1024, 1024, 64],
            "maxGridSize": [2_147_483_647, 65_535, 65_535],
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 49_152,
            "reservedSharedMemoryPerBlock": 1024,
            "oversizedSharedMemoryPerBlock": 0,
            "maxRegistersPerSM": 65_536,
            "maxCtasPerSM": 32,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": 2048,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "smClockRateKHz": 1_980_000,
            "memClockRateKHz": 3_201_000,
            "cudaDeviceId": 0,
            "driverVer": 13_000,
        });
        let objects = [common, model];
        Self { properties: objects.into_iter().flat_map(into_properties).collect() }
    }
}

fn into_properties(object: Value) -> Map<String, Value> {
    match object {
        Value::Object(properties) => properties,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_the_properties_that_cudnn_reads() {
        for properties in [DeviceProperties::h200(), DeviceProperties::a100(), DeviceProperties::b200()] {
            assert_eq!(properties.properties.len(), 26);
            assert_eq!(DeviceProperties::from_json(&properties.to_json()).unwrap(), properties);
        }
    }

    #[test]
    fn digest_is_that_of_the_model_not_of_one_device() {
        let mut other = DeviceProperties::h200();
        other.properties.insert("pciDeviceId".to_owned(), json!(7));
        assert_eq!(other.digest(), DeviceProperties::h200().digest());
        assert_ne!(other.digest(), DeviceProperties::a100().digest());
        assert_eq!(other.digest().len(), 16);
    }
}
