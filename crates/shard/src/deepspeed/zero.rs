//! Section `zero_optimization`.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::arguments::BUCKET;
use super::error::DeepSpeedError;
use super::tree::{Tree, shown, wrong};

const STAGE: &str = "zero_optimization.stage";
const OFFLOAD: &str = "zero_optimization.offload_optimizer";
const CPU_OFFLOAD: &str = "zero_optimization.cpu_offload";
const OFFLOAD_PARAM: &str = "zero_optimization.offload_param";
const CPU_OFFLOAD_PARAM: &str = "zero_optimization.cpu_offload_param";
const PREFETCH: &str = "zero_optimization.stage3_prefetch_bucket_size";
const PREFETCH_BY_ITS_OTHER_NAME: &str = "zero_optimization.prefetch_bucket_size";

/// What is partitioned over ranks.
///
/// # Source
/// DeepSpeed's `ZeroStageEnum`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ZeroStage {
    /// Stage 0, nothing: use a `DistributedDataParallel`.
    Disabled,
    /// Stage 1: use a `DistributedDataParallel` and a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer).
    OptimizerStates,
    /// Stage 2: use a [`ShardedDataParallel`](crate::ShardedDataParallel) and that optimizer.
    Gradients,
    /// Stage 3: use a [`FullyShardedDataParallel`](crate::FullyShardedDataParallel) and its optimizer.
    Parameters,
}

impl ZeroStage {
    /// DeepSpeed's number.
    pub fn number(self) -> u64 {
        match self {
            Self::Disabled => 0,
            Self::OptimizerStates => 1,
            Self::Gradients => 2,
            Self::Parameters => 3,
        }
    }
}

/// Where the optimizer's state or the parameters are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Offload {
    None,
    Cpu,
    /// In files in this folder.
    Nvme(PathBuf),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Zero {
    pub stage: ZeroStage,
    /// In elements; `None` for Overdrive's default.
    pub bucket: Option<u64>,
    pub offload: Offload,
    /// Of parameters.
    pub params: Offload,
    /// Whether units are gathered ahead.
    pub prefetches: bool,
}

/// Old forms in place of the new ones.
pub(super) fn modernise(tree: &mut Tree) -> Result<(), DeepSpeedError> {
    if let Some(&Value::Bool(is_on)) = tree.at("zero_optimization") {
        tree.set("zero_optimization", json!({"stage": u64::from(is_on)}));
    }
    for (old, new) in [(CPU_OFFLOAD, OFFLOAD), (CPU_OFFLOAD_PARAM, OFFLOAD_PARAM)] {
        if tree.flag(old)? == Some(true) {
            if tree.at(new).is_some() {
                let keys = format!("`{old}` and `{new}`");
                let reason = "the first is the second's old form".to_owned();
                return Err(DeepSpeedError::Contradiction { keys, reason });
            }
            tree.set(new, json!({"device": "cpu"}));
        }
    }
    if let Some(old) = tree.remove("bfloat16").filter(|old| !old.is_null()) {
        if tree.at("bf16").is_some() {
            let keys = "`bfloat16` and `bf16`".to_owned();
            return Err(DeepSpeedError::Contradiction {
                keys,
                reason: "the first is the second's old name".to_owned(),
            });
        }
        tree.set("bf16", old);
    }
    Ok(())
}

impl Zero {
    pub(super) fn read(tree: &Tree) -> Result<Self, DeepSpeedError> {
        let stage = match tree.count(STAGE, 0)? {
            None | Some(0) => ZeroStage::Disabled,
            Some(1) => ZeroStage::OptimizerStates,
            Some(2) => ZeroStage::Gradients,
            Some(3) => ZeroStage::Parameters,
            Some(other) => return Err(wrong(STAGE, &other.into(), "0, 1, 2 or 3")),
        };
        let (offload, params) = (offload(tree, OFFLOAD)?, offload(tree, OFFLOAD_PARAM)?);
        if stage == ZeroStage::Disabled && offload != Offload::None {
            let keys = format!("`{OFFLOAD}` and `{STAGE}`");
            let reason = "DeepSpeed keeps the optimizer on the host with stages 1 and above: set the stage".to_owned();
            return Err(DeepSpeedError::Contradiction { keys, reason });
        }
        let contradicts = |other: &str, reason: &str| {
            let keys = format!("`{OFFLOAD_PARAM}` and `{other}`");
            Err(DeepSpeedError::Contradiction { keys, reason: reason.to_owned() })
        };
        if stage != ZeroStage::Parameters && params != Offload::None {
            return contradicts(STAGE, "parameters are offloaded with stage 3 alone");
        }
        if matches!(params, Offload::Nvme(_)) && offload == Offload::Cpu {
            let reason = "where parameters are in files, so is the optimizer's state: give both the device \"nvme\", or \
                          leave `offload_optimizer` out";
            return contradicts(OFFLOAD, reason);
        }
        let ahead = tree.count(PREFETCH, 0)?.or(tree.count(PREFETCH_BY_ITS_OTHER_NAME, 0)?);
        Ok(Self { stage, bucket: tree.count(BUCKET, 1)?, offload, params, prefetches: ahead != Some(0) })
    }
}

fn offload(tree: &Tree, section: &str) -> Result<Offload, DeepSpeedError> {
    let (device, path) = (format!("{section}.device"), format!("{section}.nvme_path"));
    let folder = tree.text(&path)?;
    match tree.text(&device)? {
        None | Some("none") => Ok(Offload::None),
        Some("cpu") => Ok(Offload::Cpu),
        Some("nvme") => match folder {
            Some(folder) => Ok(Offload::Nvme(folder.into())),
            None => Err(DeepSpeedError::Missing {
                key: path,
                reason: "what is offloaded is in files in this folder".to_owned(),
            }),
        },
        Some(other) => {
            let expected = "\"none\", \"cpu\" or \"nvme\"".to_owned();
            Err(DeepSpeedError::Value { key: device, found: shown(&other.into()), expected })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Zero, String> {
        let mut tree = Tree::parse(text).unwrap();
        modernise(&mut tree).and_then(|()| Zero::read(&tree)).map_err(|error| error.to_string())
    }

    fn zero(stage: ZeroStage, bucket: Option<u64>, offload: Offload) -> Result<Zero, String> {
        Ok(Zero { stage, bucket, offload, params: Offload::None, prefetches: true })
    }

    #[test]
    fn stages_and_offload_are_read_in_old_and_new_forms() {
        use ZeroStage::{Disabled, Gradients, OptimizerStates};
        assert_eq!(read("{}"), zero(Disabled, None, Offload::None));
        assert_eq!(read(r#"{"zero_optimization": true}"#), zero(OptimizerStates, None, Offload::None));
        assert_eq!(read(r#"{"zero_optimization": false}"#), zero(Disabled, None, Offload::None));
        let text = r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "cpu_offload": true}}"#;
        assert_eq!(read(text), zero(Gradients, Some(200_000_000), Offload::Cpu));
        let text = r#"{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}}"#;
        assert_eq!(read(text), zero(OptimizerStates, None, Offload::Nvme("/a".into())));
        let text = r#"{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}}"#;
        assert_eq!(read(text), zero(Disabled, None, Offload::None));
    }

    #[test]
    fn stage_3_says_where_parameters_and_state_are() {
        let stage = ZeroStage::Parameters;
        let of = |offload, params, prefetches| Ok(Zero { stage, bucket: None, offload, params, prefetches });
        let read = |keys: &str| read(&format!(r#"{{"zero_optimization": {{"stage": 3{keys}}}}}"#));
        assert_eq!(read(""), of(Offload::None, Offload::None, true));
        assert_eq!(read(r#", "stage3_prefetch_bucket_size": 0"#), of(Offload::None, Offload::None, false));
        assert_eq!(read(r#", "cpu_offload_param": true"#), of(Offload::None, Offload::Cpu, true));
        let both = r#", "offload_param": {"device": "nvme", "nvme_path": "/a"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}"#;
        assert_eq!(read(both), of(Offload::Nvme("/b".into()), Offload::Nvme("/a".into()), true));
        let mixed =
            r#", "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}"#;
        assert_eq!(read(mixed), of(Offload::Nvme("/b".into()), Offload::Cpu, true));
    }

    #[test]
    fn what_is_wrong_or_contradicts_is_named() {
        for (text, expected) in [
            (r#"{"zero_optimization": {"stage": 4}}"#, "`zero_optimization.stage` is 4, but should be 0, 1, 2 or 3"),
            (r#"{"zero_optimization": {"stage": "2"}}"#, "`zero_optimization.stage` is \"2\""),
            (r#"{"zero_optimization": {"stage": "auto"}}"#, "`zero_optimization.stage` is \"auto\""),
            (r#"{"zero_optimization": {"reduce_bucket_size": 0}}"#, "`zero_optimization.reduce_bucket_size` is 0"),
            (
                r#"{"zero_optimization": {"stage": 1, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}"#,
                "`zero_optimization.cpu_offload` and `zero_optimization.offload_optimizer` contradict",
            ),
            (
                r#"{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}"#,
                "`zero_optimization.offload_optimizer` and `zero_optimization.stage` contradict",
            ),
            (
                r#"{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}"#,
                "`zero_optimization.offload_optimizer.nvme_path` is missing",
            ),
            (
                r#"{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "gpu"}}}"#,
                "`zero_optimization.offload_optimizer.device` is \"gpu\"",
            ),
            (
                r#"{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}"#,
                "`zero_optimization.offload_param` and `zero_optimization.stage` contradict",
            ),
            (
                r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"},
                    "offload_optimizer": {"device": "cpu"}}}"#,
                "`zero_optimization.offload_param` and `zero_optimization.offload_optimizer` contradict",
            ),
            (
                r#"{"zero_optimization": {"stage": 3, "cpu_offload_param": true, "offload_param": {"device": "cpu"}}}"#,
                "`zero_optimization.cpu_offload_param` and `zero_optimization.offload_param` contradict",
            ),
            (r#"{"bfloat16": {"enabled": true}, "bf16": {}}"#, "`bfloat16` and `bf16` contradict"),
        ] {
            let told = read(text).expect_err(text);
            assert!(told.starts_with(expected), "{told}");
        }
    }
}
