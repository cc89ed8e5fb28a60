//! Errors that AddressSanitizer has to find, in Rust and in C++: `cargo xtask sanitize` runs them first.

unsafe extern "C" {
    fn read_freed_in_cpp() -> i32;
}

fn read_freed_in_rust() -> i32 {
    let freed = Box::into_raw(Box::new(1));
    // SAFETY: none, this is the planted error.
    unsafe {
        drop(Box::from_raw(freed));
        freed.read_volatile()
    }
}

fn main() {
    let number = match std::env::args().nth(1).as_deref() {
        Some("rust") => read_freed_in_rust(),
        // SAFETY: none, as above.
        Some("c++") => unsafe { read_freed_in_cpp() },
        _ => 1,
    };
    println!("{number}");
}
