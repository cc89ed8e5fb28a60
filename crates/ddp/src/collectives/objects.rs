//! Collectives on Rust objects, serialized by serde.

use overdrive_ffi::{Arg, LazyOp};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Kind, Tensor};

use crate::error::DdpError;
use crate::group::ProcessGroup;

static ZEROS: LazyOp = LazyOp::new("aten::new_zeros", "");

impl ProcessGroup {
    /// Returns `root`'s object on all ranks; the others pass `None`.
    ///
    /// Sent as MessagePack, so it does not mix with PyTorch's pickled objects.
    ///
    /// # Errors
    /// When `root` passes `None`, the object cannot be serialized or deserialized, or a rank has exited or does not
    /// take part within the group's timeout. An object that cannot be serialized is an error on all ranks.
    ///
    /// # Syncs
    /// Waits for other ranks, and for the device.
    ///
    /// # Source
    /// `torch.distributed.broadcast_object_list`
    #[doc(alias = "broadcast_object_list")]
    pub fn broadcast_object<T>(&self, object: Option<&T>, root: usize) -> Result<T, DdpError>
    where
        T: Serialize + DeserializeOwned,
    {
        const OP: &str = "broadcast_object";
        self.check_rank("the root", root)?;
        let (written, failure) = if self.rank() == root {
            apart(object.ok_or_else(|| "the root passed no object".into()).and_then(write))
        } else {
            (Vec::new(), None)
        };
        let mut length = self.lengths(&[written.len() as i64])?;
        self.on_host(self.broadcast_async(&mut length, root)?)?;
        let length = read_length(&length)?;
        if length == 0 {
            let source = failure.unwrap_or_else(|| "the root could not serialize it".into());
            return Err(DdpError::Object { op: OP, rank: root, direction: "sent", source });
        }
        let mut bytes = self.bytes(&written, length)?;
        self.on_host(self.broadcast_async(&mut bytes, root)?)?;
        read(OP, root, &bytes)
    }

    /// Every rank's object, in the order of ranks.
    ///
    /// Sent as MessagePack, so it does not mix with PyTorch's pickled objects.
    ///
    /// # Errors
    /// When an object cannot be serialized (an error on all ranks) or deserialized, or a rank has exited or does not
    /// take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks, and for the device.
    ///
    /// # Source
    /// `torch.distributed.all_gather_object`
    pub fn all_gather_object<T>(&self, object: &T) -> Result<Vec<T>, DdpError>
    where
        T: Serialize + DeserializeOwned,
    {
        const OP: &str = "all_gather_object";
        let (written, mut failure) = apart(write(object));
        let lengths = self.on_host(self.all_gather_async(&self.lengths(&[written.len() as i64])?)?)?;
        let lengths = lengths.iter().map(read_length).collect::<Result<Vec<_>, _>>()?;
        if let Some(rank) = lengths.iter().position(|&length| length == 0) {
            let own = failure.take().filter(|_| rank == self.rank());
            let source = own.unwrap_or_else(|| "that rank could not serialize it".into());
            return Err(DdpError::Object { op: OP, rank, direction: "sent", source });
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let padded = self.on_host(self.all_gather_async(&self.bytes(&written, longest)?)?)?;
        let parts = padded.iter().zip(&lengths).enumerate();
        parts.map(|(rank, (bytes, &length))| read(OP, rank, &bytes.f_narrow(0, 0, length as i64)?)).collect()
    }

    fn lengths(&self, lengths: &[i64]) -> Result<Tensor, DdpError> {
        Ok(Tensor::f_from_slice(lengths)?.f_to_device(self.device())?)
    }

    /// The bytes, then zeros up to `length`.
    fn bytes(&self, written: &[u8], length: usize) -> Result<Tensor, DdpError> {
        let bytes = Tensor::f_from_slice(written)?;
        let shape = [length as i64];
        let mut padded = ZEROS.tensor(&[Arg::Tensor(&bytes), Arg::IntList(&shape)])?;
        if !written.is_empty() {
            padded.f_narrow(0, 0, written.len() as i64)?.f_copy_(&bytes)?;
        }
        padded = padded.f_to_device(self.device())?;
        Ok(padded)
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

fn write<T: Serialize + ?Sized>(object: &T) -> Result<Vec<u8>, BoxError> {
    Ok(rmp_serde::to_vec_named(object)?)
}

/// Splits the result into bytes and error. On the other ranks, zero bytes say that the object could not be serialized:
/// MessagePack always has some.
fn apart(written: Result<Vec<u8>, BoxError>) -> (Vec<u8>, Option<BoxError>) {
    written.map_or_else(|error| (Vec::new(), Some(error)), |bytes| (bytes, None))
}

fn read<T: DeserializeOwned>(op: &'static str, rank: usize, bytes: &Tensor) -> Result<T, DdpError> {
    let bytes: Vec<u8> = Vec::try_from(&bytes.f_to_device(tch::Device::Cpu)?.f_to_kind(Kind::Uint8)?)?;
    rmp_serde::from_slice(&bytes).map_err(|source| DdpError::Object {
        op,
        rank,
        direction: "read",
        source: Box::new(source),
    })
}

fn read_length(length: &Tensor) -> Result<usize, DdpError> {
    let length = length.f_int64_value(&[0])?;
    Ok(usize::try_from(length).unwrap_or(0))
}
