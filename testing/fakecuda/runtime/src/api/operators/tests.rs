use std::sync::Mutex;

use super::*;
use crate::api::captures::{cudaStreamBeginCapture, cudaStreamEndCapture};
use crate::api::graphs::{cudaGraphDestroy, cudaGraphExecDestroy, cudaGraphInstantiate, cudaGraphLaunch};
use crate::api::nccl_tests::{alone, new_stream};
use crate::api::streams::cudaStreamSynchronize;

const GLOBAL: i32 = 0;

/// What a test's operators do: they add their own number to a list.
struct Noting {
    number: u32,
    ran: Arc<Mutex<Vec<u32>>>,
}

extern "C" fn note(data: *mut c_void) -> *const c_char {
    // SAFETY: made by `push`, and not dropped yet.
    let own = unsafe { &*data.cast::<Noting>() };
    own.ran.lock().unwrap().push(own.number);
    std::ptr::null()
}

extern "C" fn end(data: *mut c_void) {
    // SAFETY: made by `push`, and dropped once.
    drop(unsafe { Box::from_raw(data.cast::<Noting>()) });
}

fn push(stream: usize, number: u32, ran: &Arc<Mutex<Vec<u32>>>) -> i32 {
    let data = Box::into_raw(Box::new(Noting { number, ran: ran.clone() }));
    // SAFETY: a text that ends with a zero byte, no ranges, and data for these functions.
    unsafe { fakecuda_operator(stream, c"test".as_ptr(), std::ptr::null(), 0, note, end, data.cast()) }
}

#[test]
fn captured_numbers_run_at_each_launch_in_order_and_are_dropped_with_the_graph() {
    alone("api::operators::tests::captured_numbers_run_at_each_launch_in_order_and_are_dropped_with_the_graph", || {
        let (stream, mut graph, mut executable, ran) = (new_stream(), 0, 0, Arc::default());
        // SAFETY: all are valid for writes.
        unsafe {
            assert_eq!(cudaStreamBeginCapture(stream, GLOBAL), 0);
            assert_eq!([push(stream, 1, &ran), fakecuda_finish(stream), push(stream, 2, &ran)], [0; 3]);
            assert_eq!(cudaStreamEndCapture(stream, &raw mut graph), 0);
            assert_eq!(cudaGraphInstantiate(&raw mut executable, graph, 0), 0);
        }
        assert_eq!(*ran.lock().unwrap(), [0; 0], "only captured");
        let launch = || cudaGraphLaunch(executable, stream);
        assert_eq!([launch(), push(stream, 3, &ran), launch(), fakecuda_finish(stream)], [0; 4]);
        assert_eq!(*ran.lock().unwrap(), [1, 2, 3, 1, 2]);
        assert_eq!(Arc::strong_count(&ran), 3, "the graph keeps its own");
        assert_eq!([cudaGraphDestroy(graph), cudaGraphExecDestroy(executable), cudaStreamSynchronize(stream)], [0; 3]);
        assert_eq!(Arc::strong_count(&ran), 1);
    });
}
