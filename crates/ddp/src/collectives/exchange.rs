//! All-to-all collectives: every rank sends a part to every rank.

use overdrive_ffi::c10d::CollectiveKind;
use tch::Tensor;

use super::{Parts, check};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

impl ProcessGroup {
    /// Sends a tensor to each rank, and overwrites `outputs` with the tensors that the ranks sent to this one.
    ///
    /// # Shapes
    /// One tensor per rank in each list. On rank r, `inputs[s]` must have as many elements as `outputs[r]` has on rank
    /// s.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, a list does not have one tensor per rank, dtypes or devices differ,
    /// or a rank has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.all_to_all`
    pub fn all_to_all(&self, outputs: &mut [Tensor], inputs: &[Tensor]) -> Result<(), DdpError> {
        self.all_to_all_async(outputs, inputs)?.wait()
    }

    /// Starts [`all_to_all`](Self::all_to_all). `outputs` are complete after [`Work::wait`].
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, a list does not have one tensor per rank, or dtypes or devices
    /// differ.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn all_to_all_async(&self, outputs: &mut [Tensor], inputs: &[Tensor]) -> Result<Work, DdpError> {
        const OP: &str = "all_to_all";
        check::one_per_rank(self, OP, "outputs", outputs)?;
        check::one_per_rank(self, OP, "inputs", inputs)?;
        let first = ("inputs[0]", &inputs[0]);
        check::list(self, OP, "inputs", inputs, first, check::Shapes::Any)?;
        check::list(self, OP, "outputs", outputs, first, check::Shapes::Any)?;
        // Gloo has only the form with one tensor. So the inputs are concatenated, and what is received is split into
        // the outputs.
        let _no_grad = tch::no_grad_guard();
        let numels = |tensors: &[Tensor]| tensors.iter().map(|tensor| tensor.numel() as i64).collect::<Vec<_>>();
        let (input_splits, output_splits) = (numels(inputs), numels(outputs));
        let flat = inputs.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
        let flat_input = Tensor::f_cat(&flat, 0)?;
        let received =
            flat_input.f_new_empty([output_splits.iter().sum::<i64>()], (flat_input.kind(), flat_input.device()))?;
        let mut targets: Vec<Tensor> = outputs.iter().map(Tensor::shallow_clone).collect();
        let parts = Parts {
            inputs: std::slice::from_ref(&flat_input),
            outputs: std::slice::from_ref(&received),
            splits: Some((&input_splits, &output_splits)),
            ..Parts::default()
        };
        let (flat_output, sizes) = (received.shallow_clone(), output_splits.clone());
        self.start(OP, CollectiveKind::AllToAllSingle, &parts, move |_| {
            let _no_grad = tch::no_grad_guard();
            for (target, part) in targets.iter_mut().zip(flat_output.f_split_with_sizes(&sizes, 0)?) {
                let shape = target.size();
                target.f_copy_(&part.f_view(&shape[..])?)?;
            }
            Ok(())
        })
    }

    /// Sends some of a tensor's rows to each rank, and fills `output` with the rows that each rank sent to this one, in
    /// the order of ranks.
    ///
    /// # Shapes
    /// `splits` are the numbers of rows of `input` that go to each rank, and of rows of `output` that come from each.
    /// With `None`, all parts are equal.
    ///
    /// # Errors
    /// When a tensor is a scalar, or is not dense and contiguous; dtypes or devices differ; there is not one split per
    /// rank, a split is negative, or the splits do not add up to the tensor's rows; without splits, when the number of
    /// ranks does not divide the rows. When a rank has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.all_to_all_single`
    pub fn all_to_all_single(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        splits: Option<(&[i64], &[i64])>,
    ) -> Result<(), DdpError> {
        self.all_to_all_single_async(output, input, splits)?.wait()
    }

    /// Starts [`all_to_all_single`](Self::all_to_all_single). `output` is complete after [`Work::wait`].
    ///
    /// # Errors
    /// As [`all_to_all_single`](Self::all_to_all_single), for the tensors and the splits.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn all_to_all_single_async(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        splits: Option<(&[i64], &[i64])>,
    ) -> Result<Work, DdpError> {
        const OP: &str = "all_to_all_single";
        check::tensor(self, OP, "output", output)?;
        check::tensor(self, OP, "input", input)?;
        check::same(OP, "output", output, ("input", input), check::Shapes::Any)?;
        self.check_rows("input", input, splits.map(|(inputs, _)| inputs))?;
        self.check_rows("output", output, splits.map(|(_, outputs)| outputs))?;
        let parts = Parts {
            inputs: std::slice::from_ref(input),
            outputs: std::slice::from_ref(output),
            splits,
            ..Parts::default()
        };
        self.start(OP, CollectiveKind::AllToAllSingle, &parts, |_| Ok(()))
    }

    fn check_rows(&self, argument: &str, tensor: &Tensor, splits: Option<&[i64]>) -> Result<(), DdpError> {
        let wrong = |found: String, expected: String| DdpError::InvalidTensor {
            op: "all_to_all_single",
            argument: argument.to_owned(),
            found,
            expected,
        };
        let Some(&rows) = tensor.size().first() else {
            return Err(wrong("a scalar".to_owned(), "of at least one dimension".to_owned()));
        };
        let size = self.size();
        match splits {
            None if rows % size as i64 == 0 => Ok(()),
            None => Err(wrong(
                format!("of {rows} rows"),
                format!("of a multiple of {size} rows ({size} is the number of ranks), unless splits are given"),
            )),
            Some(splits) => {
                let fits = splits.len() == size && splits.iter().all(|&rows| rows >= 0);
                if fits && splits.iter().map(|&rows| i128::from(rows)).sum::<i128>() == i128::from(rows) {
                    return Ok(());
                }
                let found = format!("split into {splits:?}");
                let expected = format!("split into {size} parts, one per rank, of 0 rows or more and of {rows} in all");
                Err(wrong(found, expected))
            }
        }
    }
}
