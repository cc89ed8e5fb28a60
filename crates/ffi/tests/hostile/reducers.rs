//! Reducers that are dropped or called at the wrong time, and reducers with invalid parameters.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use overdrive_ffi::c10d::{BucketHook, GradBucket, ProcessGroup, Reducer, ReducerOptions};
use overdrive_ffi::{GradHook, TensorList};
use tch::{Kind, Tensor};

use super::groups::alone;
use super::{FLOAT, ends};

const OPTIONS: ReducerOptions<'static> = ReducerOptions {
    bucket_bytes: None,
    bucket_list: &[],
    skip_unused: false,
    find_unused_parameters: false,
    gradient_as_bucket_view: false,
    static_graph: false,
    broadcast_buffers: false,
    low: None,
    frozen: None,
};

fn params(n: usize) -> Vec<(String, Tensor)> {
    (0..n).map(|i| (i.to_string(), Tensor::ones([2], FLOAT).set_requires_grad(true))).collect()
}

fn armed(group: &ProcessGroup, params: &[(String, Tensor)]) -> Reducer {
    let reducer = Reducer::new(group, params, |_| false, &OPTIONS).unwrap();
    reducer.before_forward(true).unwrap();
    reducer.arm(&TensorList::new::<Tensor>(&[]).unwrap()).unwrap();
    reducer
}

/// A hook that records how often it was called, and when it is dropped; its first call runs `call`.
struct Watched {
    call: Option<Box<dyn FnOnce() + Send>>,
    calls: Arc<AtomicUsize>,
    gone: Arc<AtomicBool>,
    buffer: Option<Tensor>,
}

impl BucketHook for Watched {
    fn start(&mut self, bucket: GradBucket) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.buffer = Some(bucket.buffer * 3.0);
        if let Some(call) = self.call.take() {
            call();
        }
        if self.gone.load(Ordering::SeqCst) { Err("it was dropped while it runs".into()) } else { Ok(()) }
    }

    fn finish(&mut self, _: usize) -> Result<Tensor, Box<dyn std::error::Error + Send + Sync>> {
        self.buffer.take().ok_or_else(|| "nothing was started".into())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

fn watched(call: Option<Box<dyn FnOnce() + Send>>) -> (Watched, Arc<AtomicUsize>, Arc<AtomicBool>) {
    let (calls, gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    (Watched { call, calls: calls.clone(), gone: gone.clone(), buffer: None }, calls, gone)
}

#[test]
fn a_reducer_that_its_own_hook_drops_lives_until_backward_ends() {
    ends(|| {
        let (group, params) = (alone("own hook"), params(2));
        let slot = Arc::new(Mutex::new(None::<Reducer>));
        let own = slot.clone();
        let (hook, calls, gone) = watched(Some(Box::new(move || drop(own.lock().unwrap().take()))));
        let mut reducer = armed(&group, &params);
        reducer.set_hook(Box::new(hook)).unwrap();
        *slot.lock().unwrap() = Some(reducer);
        let loss = params[0].1.sum(Kind::Float) + params[1].1.sum(Kind::Float);
        loss.f_backward().unwrap();
        assert!(slot.lock().unwrap().is_none() && gone.load(Ordering::SeqCst), "it is dropped after the pass");
        assert_eq!((calls.load(Ordering::SeqCst), params[1].1.grad().double_value(&[0])), (1, 3.0));
        params[0].1.sum(Kind::Float).f_backward().unwrap();
        assert_eq!((calls.load(Ordering::SeqCst), params[0].1.grad().double_value(&[0])), (1, 4.0));
    });
}

#[test]
fn a_reducer_dropped_while_another_thread_runs_backward_lives_until_that_ends() {
    ends(|| {
        let (group, params) = (alone("other thread"), params(2));
        let (hook, calls, gone) = watched(None);
        let mut reducer = armed(&group, &params);
        reducer.set_hook(Box::new(hook)).unwrap();
        let first = Tensor::ones([2], FLOAT).set_requires_grad(true);
        let (began, has_begun) = mpsc::channel();
        let (dropped, is_dropped) = mpsc::channel();
        let _hook = GradHook::new(&first, move || {
            began.send(()).unwrap();
            is_dropped.recv().unwrap();
        });
        // Backward runs from the last operation to the first, so `first` comes before the parameters.
        let loss = params[0].1.sum(Kind::Float) + params[1].1.sum(Kind::Float);
        let loss = loss + first.sum(Kind::Float);
        let backward = std::thread::spawn(move || loss.f_backward());
        has_begun.recv().unwrap();
        drop(reducer);
        assert!(!gone.load(Ordering::SeqCst));
        dropped.send(()).unwrap();
        backward.join().unwrap().unwrap();
        assert!(gone.load(Ordering::SeqCst));
        assert_eq!((calls.load(Ordering::SeqCst), params[0].1.grad().double_value(&[0])), (1, 3.0));
    });
}

#[test]
fn invalid_parameters_are_refused_and_leave_no_hook_behind() {
    ends(|| {
        let group = alone("refused");
        let leaf = || Tensor::ones([2], FLOAT).set_requires_grad(true);
        let twice = leaf();
        let wrong: [(&str, Vec<Tensor>); 5] = [
            ("none", vec![]),
            ("undefined", vec![leaf(), Tensor::new()]),
            ("frozen", vec![leaf(), Tensor::ones([2], FLOAT)]),
            ("computed", vec![leaf(), leaf() * 2.0]),
            ("twice", vec![twice.shallow_clone(), leaf(), twice]),
        ];
        for (what, tensors) in wrong {
            let named: Vec<_> = tensors.iter().map(|tensor| ("p".to_owned(), tensor.shallow_clone())).collect();
            let refused = Reducer::new(&group, &named, |_| false, &OPTIONS);
            assert!(refused.is_err(), "{what}");
            if let Some(first) = tensors.first() {
                first.sum(Kind::Float).f_backward().unwrap();
            }
        }
    });
}

#[test]
fn a_reducer_refuses_every_call_within_its_own_hook() {
    ends(|| {
        let (group, params) = (alone("every call"), params(1));
        let slot = Arc::new(Mutex::new(None::<Reducer>));
        let (own, seen) = (slot.clone(), Arc::new(Mutex::new(Vec::new())));
        let told = seen.clone();
        let (hook, ..) = watched(Some(Box::new(move || {
            let mut own = own.lock().unwrap();
            let reducer = own.as_mut().unwrap();
            let nothing = TensorList::new::<Tensor>(&[]).unwrap();
            let (second, ..) = watched(None);
            let results = [
                ("before_forward", reducer.before_forward(true).map(drop)),
                ("arm", reducer.arm(&nothing)),
                ("disarm", reducer.disarm()),
                ("close_with_nothing", reducer.close_with_nothing()),
                ("sink", reducer.sink(&nothing).map(drop)),
                ("compress_to_half", reducer.compress_to_half()),
                ("set_hook", reducer.set_hook(Box::new(second))),
                ("shadow_backward", reducer.shadow_backward()),
                ("set_log_rate", reducer.set_log_rate(5)),
                ("log", reducer.log().map(drop)),
            ];
            told.lock().unwrap().extend(results.into_iter().filter(|(_, result)| result.is_ok()).map(|(name, _)| name));
        })));
        let mut reducer = armed(&group, &params);
        reducer.set_hook(Box::new(hook)).unwrap();
        *slot.lock().unwrap() = Some(reducer);
        params[0].1.sum(Kind::Float).f_backward().unwrap();
        assert_eq!(*seen.lock().unwrap(), [""; 0], "these were not refused");
        assert_eq!(params[0].1.grad().double_value(&[0]), 3.0);
    });
}

/// A hook that always returns this tensor.
struct Returns(Tensor);

impl BucketHook for Returns {
    fn start(&mut self, _: GradBucket) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }

    fn finish(&mut self, _: usize) -> Result<Tensor, Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.0.shallow_clone())
    }
}

#[test]
fn invalid_results_and_outputs_are_refused() {
    ends(|| {
        for result in [Tensor::new(), Tensor::ones([1], FLOAT), Tensor::ones([2], FLOAT).to_sparse_sparse_dim(1)] {
            let (group, params) = (alone("results"), params(2));
            let mut reducer = armed(&group, &params);
            reducer.set_hook(Box::new(Returns(result.shallow_clone()))).unwrap();
            let loss = params[0].1.sum(Kind::Float) + params[1].1.sum(Kind::Float);
            assert!(loss.f_backward().is_err(), "{result:?}");
        }
        let group = alone("outputs");
        let params = params(2);
        let options = ReducerOptions { find_unused_parameters: true, ..OPTIONS };
        let reducer = Reducer::new(&group, &params, |_| false, &options).unwrap();
        reducer.before_forward(true).unwrap();
        let outputs = TensorList::new(&[Tensor::new(), params[0].1.sum(Kind::Float)]).unwrap();
        let outputs = reducer.sink(&outputs).unwrap();
        assert!(reducer.arm(&outputs).is_err());
        outputs.get(1).unwrap().f_backward().unwrap();
        assert!(overdrive_ffi::c10d::backward(&Tensor::new()).is_err());
    });
}

#[test]
fn a_hook_that_runs_a_backward_pass_gets_an_error() {
    ends(|| {
        let (group, params) = (alone("nested"), params(1));
        let result = Arc::new(Mutex::new(None));
        let (told, param) = (result.clone(), params[0].1.shallow_clone());
        let (hook, ..) = watched(Some(Box::new(move || {
            let loss = tch::with_grad(|| param.sum(Kind::Float));
            *told.lock().unwrap() = Some(loss.f_backward().map_err(|error| error.to_string()));
        })));
        let mut reducer = armed(&group, &params);
        reducer.set_hook(Box::new(hook)).unwrap();
        params[0].1.sum(Kind::Float).f_backward().unwrap();
        let refused = result.lock().unwrap().take().unwrap().unwrap_err();
        assert!(refused.contains("a communication hook cannot run a backward pass"), "{refused}");
        assert_eq!(params[0].1.grad().double_value(&[0]), 3.0);
    });
}

#[test]
fn the_hook_of_a_gradient_waits_for_its_average() {
    ends(|| {
        for before in [true, false] {
            let (group, params) = (alone("average"), params(2));
            let seen = Arc::new(Mutex::new(Vec::new()));
            let hook = |param: &Tensor| {
                let (log, own) = (seen.clone(), param.shallow_clone());
                GradHook::new(param, move || log.lock().unwrap().push(own.grad().double_value(&[0]))).unwrap()
            };
            let early = before.then(|| hook(&params[0].1));
            let (watched, ..) = watched(None);
            let mut reducer = armed(&group, &params);
            reducer.set_hook(Box::new(watched)).unwrap();
            let _hook = early.unwrap_or_else(|| hook(&params[0].1));
            let backward = || (params[0].1.sum(Kind::Float) + params[1].1.sum(Kind::Float)).f_backward().unwrap();
            backward();
            assert_eq!(*seen.lock().unwrap(), [3.0], "once, with the communicated gradient");
            // A pass that leaves gradients local adds to them; the next pass that averages does so with the sum.
            reducer.disarm().unwrap();
            backward();
            assert_eq!(seen.lock().unwrap().len(), 1);
            reducer.arm(&TensorList::new::<Tensor>(&[]).unwrap()).unwrap();
            reducer.close_with_nothing().unwrap();
            assert_eq!(seen.lock().unwrap()[1..], [12.0]);
            drop(reducer);
            backward();
            assert_eq!(seen.lock().unwrap()[2..], [13.0], "without a reducer the hook is called at once");
        }
    });
}
