//! Maps tch's kinds to safetensors' dtypes.

use safetensors::Dtype;
use tch::Kind;

const PAIRS: [(Kind, Dtype); 15] = [
    (Kind::Bool, Dtype::BOOL),
    (Kind::Uint8, Dtype::U8),
    (Kind::Int8, Dtype::I8),
    (Kind::Int16, Dtype::I16),
    (Kind::Int, Dtype::I32),
    (Kind::Int64, Dtype::I64),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Float, Dtype::F32),
    (Kind::Double, Dtype::F64),
    (Kind::ComplexFloat, Dtype::C64),
    (Kind::Float8e5m2, Dtype::F8_E5M2),
    (Kind::Float8e4m3fn, Dtype::F8_E4M3),
    (Kind::Float8e5m2fnuz, Dtype::F8_E5M2FNUZ),
    (Kind::Float8e4m3fnuz, Dtype::F8_E4M3FNUZ),
];

pub(crate) fn dtype_of(kind: Kind) -> Option<Dtype> {
    PAIRS.iter().find(|(own, _)| *own == kind).map(|(_, dtype)| *dtype)
}

pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    PAIRS.iter().find(|(_, own)| *own == dtype).map(|(kind, _)| *kind)
}
