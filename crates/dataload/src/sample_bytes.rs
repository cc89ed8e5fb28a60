//! How much memory samples take that are read and not part of a batch yet.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use tch::Tensor;

use crate::tensor_batch::footprint_of;
use crate::{DataError, Deferred, EncodedImage, Image};

/// The bytes of a sample.
pub(crate) type SampleBytes<S> = Arc<dyn Fn(&S) -> usize + Send + Sync>;

/// How the types of samples that most datasets give are measured, without an option that says it.
pub(crate) fn usual_sample_bytes<S: 'static>() -> Option<SampleBytes<S>> {
    fn of<S: 'static>(bytes: fn(&S) -> usize) -> Box<dyn Any> {
        let bytes: SampleBytes<S> = Arc::new(bytes);
        Box::new(bytes)
    }
    let usual = [
        of::<Vec<u8>>(Vec::len),
        of::<(Vec<u8>, i64)>(|(bytes, _)| bytes.len()),
        of::<(Vec<u8>, String)>(|(bytes, text)| bytes.len() + text.len()),
        of::<String>(String::len),
        of::<EncodedImage>(|image| image.bytes.len()),
        of::<(EncodedImage, i64)>(|(image, _)| image.bytes.len()),
        of::<(EncodedImage, String)>(|(image, text)| image.bytes.len() + text.len()),
        of::<Image>(|image| image.data().len()),
        of::<(Image, i64)>(|(image, _)| image.data().len()),
        of::<Tensor>(|tensor| footprint_of(tensor).host),
        of::<(Tensor, i64)>(|(tensor, _)| footprint_of(tensor).host),
        of::<(Tensor, Tensor)>(|pair| footprint_of(pair).host),
        of::<BTreeMap<String, String>>(|texts| texts.iter().map(|(name, text)| name.len() + text.len()).sum()),
        #[cfg(feature = "jsonl")]
        of::<serde_json::Value>(bytes_of_json),
        #[cfg(any(feature = "arrow", feature = "parquet"))]
        of::<crate::Row>(crate::Row::bytes_of_values),
        #[cfg(any(feature = "arrow", feature = "parquet"))]
        of::<crate::Table>(|table| footprint_of(table).host),
        #[cfg(feature = "lmdb")]
        of::<crate::LmdbSample>(|sample| sample.value().len()),
        #[cfg(feature = "mds")]
        of::<crate::MdsSample>(crate::MdsSample::len_in_bytes),
    ];
    usual.into_iter().find_map(|bytes| bytes.downcast().ok()).map(|bytes| *bytes)
}

/// A value, and what it holds.
#[cfg(feature = "jsonl")]
fn bytes_of_json(value: &serde_json::Value) -> usize {
    use serde_json::Value;
    let inner = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(bytes_of_json).sum(),
        Value::Object(values) => values.iter().map(|(name, value)| name.len() + bytes_of_json(value)).sum(),
    };
    size_of::<Value>() + inner
}

/// Samples of a stream with their bytes, if they are of such a type.
pub(crate) fn measured<S: 'static>(
    samples: impl Iterator<Item = Result<S, DataError>>,
) -> impl Iterator<Item = Result<Deferred<S>, DataError>> {
    let bytes_of = usual_sample_bytes::<S>();
    samples.map(move |sample| {
        let sample = sample?;
        let bytes = bytes_of.as_ref().map_or(0, |bytes_of| bytes_of(&sample));
        Ok(Deferred::ready(sample).of_bytes(bytes))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cancellation, FnStream, IterableDataset};

    #[test]
    fn usual_samples_of_a_stream_are_measured() {
        let stream = FnStream::new(1, |_| Ok([vec![0u8; 9], vec![0; 3]].map(Ok).into_iter()));
        let deferred = stream.open_deferred(0, 0, &Cancellation::default()).unwrap();
        assert_eq!(deferred.map(|sample| sample.unwrap().bytes()).collect::<Vec<_>>(), [9, 3]);
    }

    #[test]
    #[cfg(feature = "jsonl")]
    fn values_of_json_are_measured_with_what_they_hold() {
        let bytes = usual_sample_bytes::<serde_json::Value>().unwrap();
        let (text, list) = (serde_json::json!({ "text": "x".repeat(1000) }), serde_json::json!([1, 2, [3, null]]));
        assert!((1004..1200).contains(&bytes(&text)) && (6 * 16..6 * 64).contains(&bytes(&list)));
    }

    #[test]
    fn usual_samples_are_measured() {
        let measured = usual_sample_bytes::<(EncodedImage, i64)>().unwrap();
        assert_eq!(measured(&(EncodedImage::new(vec![0; 9], "file"), 3)), 9);
        assert_eq!(usual_sample_bytes::<Tensor>().unwrap()(&Tensor::from_slice(&[1i64, 2])), 16);
        let texts = BTreeMap::from([("text".to_owned(), "x".repeat(90))]);
        assert_eq!(usual_sample_bytes::<BTreeMap<String, String>>().unwrap()(&texts), 94);
        assert!(usual_sample_bytes::<Vec<usize>>().is_none());
    }
}
