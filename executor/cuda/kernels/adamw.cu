// Step of AdamW. Macros: X, type of weights; Y, type of gradients. A thread handles one element.
#include "device.cuh"

// - master: `float` weights that are updated; none if the weights themselves are
// - clip: norm, and the factor of gradients; nothing is changed if that is not a number
// - ends: end of every range of elements; factors: its factor of the weights, and its learning rate
extern "C" __global__ void adamw(X* weights, float* master, const Y* gradients, float* means, float* squares,
                                 const double* clip, const long long* ends, const float* factors, int ranges,
                                 long long len, float root, float beta1, float rest1, float beta2, float rest2,
                                 float epsilon) {
    const long long i = first_element<1>();
    const double factor = clip[1];
    if (i >= len || factor != factor) return;
    int low = 0, high = ranges - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (i < ends[middle])
            high = middle;
        else
            low = middle + 1;
    }
    const float gradient = load(gradients + i) * static_cast<float>(factor);
    const float mean = beta1 * means[i] + rest1 * gradient;
    const float square = beta2 * squares[i] + rest2 * gradient * gradient;
    const float old = master ? master[i] : load(weights + i);
    const float decay = factors[2 * low], rate = factors[2 * low + 1];
    const float weight = old * decay - rate * mean / (sqrtf(square) * root + epsilon);
    means[i] = mean;
    squares[i] = square;
    if (master) master[i] = weight;
    store(weights + i, weight);
}
