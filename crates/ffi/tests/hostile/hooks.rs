//! Gradient hooks that drop themselves, run backward passes, or are set during one.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use overdrive_ffi::GradHook;
use tch::{Kind, Tensor};

use super::{FLOAT, ends};

fn param() -> Tensor {
    Tensor::ones([2], FLOAT).set_requires_grad(true)
}

#[test]
fn a_function_that_drops_its_own_hook_is_dropped_when_it_returns() {
    ends(|| {
        let x = param();
        let slot = Arc::new(Mutex::new(None::<GradHook>));
        let held = Arc::new(());
        let (own, holds) = (slot.clone(), held.clone());
        let hook = GradHook::new(&x, move || {
            drop(own.lock().unwrap().take());
            assert_eq!(Arc::strong_count(&holds), 2, "what the function holds lives as long as it runs");
        });
        *slot.lock().unwrap() = Some(hook.unwrap());
        x.sum(Kind::Float).backward();
        assert!(slot.lock().unwrap().is_none());
        assert_eq!(Arc::strong_count(&held), 1, "and no longer");
        // The tensor can get a new hook.
        let calls = Arc::new(AtomicUsize::new(0));
        let count = calls.clone();
        let _second = GradHook::new(&x, move || _ = count.fetch_add(1, Ordering::Relaxed)).unwrap();
        x.sum(Kind::Float).backward();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_backward_pass_of_the_function_itself_does_not_call_it_again() {
    ends(|| {
        let x = param();
        let calls = Arc::new(AtomicUsize::new(0));
        let (count, inner) = (calls.clone(), x.shallow_clone());
        let _hook = GradHook::new(&x, move || {
            if count.fetch_add(1, Ordering::Relaxed) == 0 {
                tch::with_grad(|| inner.sum(Kind::Float)).backward();
            }
        });
        x.sum(Kind::Float).backward();
        assert_eq!((calls.load(Ordering::Relaxed), x.grad().double_value(&[0])), (1, 2.0));
    });
}

#[test]
fn setting_a_hook_within_a_backward_pass_of_the_same_thread_is_refused() {
    ends(|| {
        let (x, y) = (param(), param());
        let seen = Arc::new(Mutex::new(None));
        let (result, other) = (seen.clone(), y.shallow_clone());
        let _hook = GradHook::new(&x, move || {
            *result.lock().unwrap() = Some(GradHook::new(&other, || ()).map(drop).map_err(|error| error.to_string()));
        });
        (x.sum(Kind::Float) + y.sum(Kind::Float)).backward();
        let refused = seen.lock().unwrap().take().unwrap().unwrap_err();
        assert!(refused.contains("within a backward pass"), "{refused}");
        let _behind_it = GradHook::new(&y, || ()).unwrap();
        // A tensor that the pass cannot reach may get a hook.
        let (z, set) = (param(), Arc::new(Mutex::new(None)));
        let (hook, other) = (set.clone(), z.shallow_clone());
        drop(_hook);
        let _hook = GradHook::new(&x, move || *hook.lock().unwrap() = GradHook::new(&other, || ()).ok()).unwrap();
        x.sum(Kind::Float).backward();
        assert!(set.lock().unwrap().is_some());
    });
}

/// This thread's folder in `/proc`.
#[cfg(target_os = "linux")]
fn this_thread() -> PathBuf {
    Path::new("/proc").join(std::fs::read_link("/proc/thread-self").unwrap())
}

#[cfg(target_os = "linux")]
fn sleeps(thread: &Path) -> bool {
    let stat = std::fs::read_to_string(thread.join("stat")).unwrap();
    // The state follows the name, which is in brackets.
    stat.rsplit(')').next().unwrap().trim_start().starts_with('S')
}

#[cfg(target_os = "linux")]
#[test]
fn a_hook_replaces_another_only_when_no_thread_can_be_calling_that() {
    ends(|| {
        let (x, y) = (param(), param());
        drop(GradHook::new(&y, || ()).unwrap());
        let (began, has_begun) = mpsc::channel();
        let [calls, has_returned, has_ended] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
        let (caller, is_called, is_set, ended) =
            (this_thread(), calls.clone(), has_returned.clone(), has_ended.clone());
        let _hook = GradHook::new(&x, move || {
            began.send(()).unwrap();
            // Until the other thread waits in its call, or has returned from it: a thread that only lacks a core does
            // not sleep.
            while !(is_set.load(Ordering::SeqCst) || is_called.load(Ordering::SeqCst) && sleeps(&caller)) {
                std::thread::yield_now();
            }
            ended.store(true, Ordering::SeqCst);
        });
        let loss = x.sum(Kind::Float) + y.sum(Kind::Float);
        let backward = std::thread::spawn(move || loss.backward());
        has_begun.recv().unwrap();
        calls.store(true, Ordering::SeqCst);
        let _second = GradHook::new(&y, || ()).unwrap();
        let waited = has_ended.load(Ordering::SeqCst);
        has_returned.store(true, Ordering::SeqCst);
        backward.join().unwrap();
        assert!(waited, "it returned while the pass was under way");
    });
}
