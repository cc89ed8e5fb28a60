//! Sections `fp16`, `bf16` and `torch_autocast`.

use tch::Kind;

use super::error::DeepSpeedError;
use super::tree::{Tree, wrong};
use super::zero::ZeroStage;

/// The dtype of products, and how losses are scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Precision {
    /// `None` for float32.
    pub kind: Option<Kind>,
    pub scaling: Scaling,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scaling {
    /// No scale, and no step is skipped.
    Off,
    /// This scale throughout; steps whose gradients overflow are skipped.
    Fixed(f64),
    Dynamic(Dynamic),
    /// `GradScaler`'s rule and defaults.
    Torch,
}

/// The options of DeepSpeed's `DynamicLossScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Dynamic {
    pub initial: f64,
    /// How many good steps in a row double the scale.
    pub window: u64,
    /// The overflow that halves the scale: 1 for the first.
    pub hysteresis: u64,
    /// Whether a good step begins the count of overflows anew; otherwise a doubled scale does.
    pub consecutive: bool,
    pub min: f64,
    /// Whether an overflow at the smallest scale is an error.
    pub ends_at_min: bool,
}

/// A larger power would be infinite in float32.
const LARGEST_POWER: u64 = 127;

impl Precision {
    pub(super) fn read(tree: &Tree, stage: ZeroStage) -> Result<Self, DeepSpeedError> {
        let fp16 = fp16(tree, stage)?;
        let is_checked = tree.flag("bf16.check_grad_overflow")?.unwrap_or(true);
        let torch = torch_autocast(tree)?;
        let bf16 = tree.flag("bf16.enabled")?.unwrap_or(false);
        // DeepSpeed's stage 3 looks for overflows in float16 alone.
        let is_checked = is_checked && stage != ZeroStage::Parameters;
        let scaling = if is_checked { Scaling::Fixed(1.0) } else { Scaling::Off };
        let on = [
            ("`fp16.enabled`", fp16),
            ("`bf16.enabled`", bf16.then_some(Self { kind: Some(Kind::BFloat16), scaling })),
            ("`torch_autocast.enabled`", torch),
        ];
        let mut on = on.into_iter().filter_map(|(key, precision)| Some((key, precision?)));
        match (on.next(), on.next()) {
            (Some((one, _)), Some((other, _))) => {
                let keys = format!("{one} and {other}");
                Err(DeepSpeedError::Contradiction {
                    keys,
                    reason: "products have one dtype: enable one of them".to_owned(),
                })
            }
            (Some((_, precision)), None) => Ok(precision),
            (None, _) => Ok(Self { kind: None, scaling: Scaling::Off }),
        }
    }
}

fn fp16(tree: &Tree, stage: ZeroStage) -> Result<Option<Precision>, DeepSpeedError> {
    let scale = tree.size("fp16.loss_scale")?.unwrap_or(0.0);
    let power = tree.count("fp16.initial_scale_power", 0)?.unwrap_or(16);
    if power > LARGEST_POWER || scale as f32 == f32::INFINITY {
        let key = if power > LARGEST_POWER { "fp16.initial_scale_power" } else { "fp16.loss_scale" };
        let found = tree.at(key).map(ToString::to_string).unwrap_or_default();
        let expected = format!("at most {LARGEST_POWER}, or a scale below 2^128: libtorch keeps it in float32");
        return Err(DeepSpeedError::Value { key: key.to_owned(), found, expected });
    }
    let dynamic = Dynamic {
        initial: 2f64.powi(power as i32),
        window: tree.count("fp16.loss_scale_window", 1)?.unwrap_or(1000),
        hysteresis: tree.count("fp16.hysteresis", 1)?.unwrap_or(2),
        consecutive: tree.flag("fp16.consecutive_hysteresis")?.unwrap_or(false),
        min: tree.count("fp16.min_loss_scale", 1)?.unwrap_or(1) as f64,
        ends_at_min: true,
    };
    // DeepSpeed's `FP16_Optimizer` does not read the hysteresis, and ends no run.
    let dynamic = match stage {
        ZeroStage::Disabled => Dynamic { hysteresis: 1, consecutive: false, ends_at_min: false, ..dynamic },
        _ => dynamic,
    };
    let scaling = if scale > 0.0 { Scaling::Fixed(scale) } else { Scaling::Dynamic(dynamic) };
    let is_on = tree.flag("fp16.enabled")?.unwrap_or(false);
    Ok(is_on.then_some(Precision { kind: Some(Kind::Half), scaling }))
}

fn torch_autocast(tree: &Tree) -> Result<Option<Precision>, DeepSpeedError> {
    const DTYPE: &str = "torch_autocast.dtype";
    let precision = match tree.text(DTYPE)? {
        None | Some("bfloat16" | "bf16" | "torch.bfloat16") => {
            Precision { kind: Some(Kind::BFloat16), scaling: Scaling::Off }
        }
        Some("float16" | "fp16" | "half" | "torch.float16") => {
            Precision { kind: Some(Kind::Half), scaling: Scaling::Torch }
        }
        Some(other) => return Err(wrong(DTYPE, &other.into(), "\"bfloat16\" or \"float16\"")),
    };
    Ok(tree.flag("torch_autocast.enabled")?.unwrap_or(false).then_some(precision))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Precision, String> {
        Precision::read(&Tree::parse(text).unwrap(), ZeroStage::OptimizerStates).map_err(|error| error.to_string())
    }

    #[test]
    fn float16_has_deepspeed_s_defaults_and_options() {
        let scaling = |text| read(text).map(|it| (it.kind, it.scaling)).unwrap();
        let default =
            Dynamic { initial: 65536.0, window: 1000, hysteresis: 2, consecutive: false, min: 1.0, ends_at_min: true };
        assert_eq!(scaling(r#"{"fp16": {"enabled": true}}"#), (Some(Kind::Half), Scaling::Dynamic(default)));
        let text = r#"{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 5, "loss_scale_window": 7,
            "hysteresis": 1, "consecutive_hysteresis": true, "min_loss_scale": 4}}"#;
        let given = Dynamic { initial: 32.0, window: 7, hysteresis: 1, consecutive: true, min: 4.0, ends_at_min: true };
        assert_eq!(scaling(text).1, Scaling::Dynamic(given));
        assert_eq!(scaling(r#"{"fp16": {"enabled": true, "loss_scale": 128}}"#).1, Scaling::Fixed(128.0));
        let without = Precision::read(&Tree::parse(text).unwrap(), ZeroStage::Disabled).unwrap().scaling;
        assert_eq!(without, Scaling::Dynamic(Dynamic { consecutive: false, ends_at_min: false, ..given }));
    }

    #[test]
    fn bfloat16_skips_overflows_unless_told_otherwise() {
        let bf16 = |scaling| Ok(Precision { kind: Some(Kind::BFloat16), scaling });
        assert_eq!(read(r#"{"bf16": {"enabled": true}}"#), bf16(Scaling::Fixed(1.0)));
        assert_eq!(read(r#"{"bf16": {"enabled": true, "check_grad_overflow": false}}"#), bf16(Scaling::Off));
        let text = r#"{"bf16": {"enabled": true}}"#;
        let stage_3 = Precision::read(&Tree::parse(text).unwrap(), ZeroStage::Parameters).unwrap();
        assert_eq!(stage_3.scaling, Scaling::Off, "as in DeepSpeed");
        assert_eq!(read(r#"{"torch_autocast": {"enabled": true}}"#), bf16(Scaling::Off));
        let half = Ok(Precision { kind: Some(Kind::Half), scaling: Scaling::Torch });
        assert_eq!(read(r#"{"torch_autocast": {"enabled": true, "dtype": "torch.float16"}}"#), half);
    }

    #[test]
    fn sections_that_are_off_are_float32() {
        let float = Ok(Precision { kind: None, scaling: Scaling::Off });
        assert_eq!(read(r#"{"fp16": {"loss_scale": 5}, "bf16": {"enabled": false}, "torch_autocast": {}}"#), float);
    }

    #[test]
    fn two_dtypes_contradict_each_other() {
        let told = read(r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#).unwrap_err();
        let expected =
            "`fp16.enabled` and `bf16.enabled` contradict each other: products have one dtype: enable one of them";
        assert_eq!(told, expected);
        assert!(read(r#"{"torch_autocast": {"enabled": true}, "bf16": {"enabled": true}}"#).is_err());
    }

    #[test]
    fn options_out_of_range_are_named_also_where_they_are_off() {
        for (text, key) in [
            (r#"{"fp16": {"loss_scale": -1}}"#, "`fp16.loss_scale` is -1"),
            (r#"{"fp16": {"loss_scale": 1e39}}"#, "`fp16.loss_scale` is 1e"),
            (r#"{"fp16": {"loss_scale_window": 0}}"#, "`fp16.loss_scale_window` is 0"),
            (r#"{"fp16": {"min_loss_scale": 0}}"#, "`fp16.min_loss_scale` is 0"),
            (r#"{"fp16": {"hysteresis": 0}}"#, "`fp16.hysteresis` is 0"),
            (r#"{"fp16": {"initial_scale_power": 128}}"#, "`fp16.initial_scale_power` is 128"),
            (r#"{"fp16": {"enabled": "auto"}}"#, "`fp16.enabled` is \"auto\""),
            (r#"{"torch_autocast": {"dtype": "float8"}}"#, "`torch_autocast.dtype` is \"float8\""),
        ] {
            let told = read(text).unwrap_err();
            assert!(told.starts_with(key), "{told}");
        }
    }
}
