// One value to its tag and code; combinational. The paper's compression block (CB), the codec's
// clip_tag and clip_code (src/stages/float_clip/float_clip.h).
//
// The bytes of `code` that the tag leaves out are 0, so that codes can be joined with OR.
module gw_lane_compressor (
    input  logic [ 2:0] settings,  // param_a of the codec: bound (0: 10, 1: 8, 2: 6), strict
    input  logic [31:0] value,
    output logic [ 1:0] tag,
    output logic [31:0] code
);
    wire       sign = value[31];
    wire [7:0] exponent = value[30:23];

    // With a bound of 2^-B: smaller exponents than 127 - B are not sent; from 127 - B / 2 on, a
    // value takes 16 bits. 8 bits cut off the bits of `cut`, which strict mode does not allow.
    logic [7:0] smallest, wide;
    logic [7:0] cut;
    always_comb begin
        unique case (settings[1:0])
            2'd0:    {smallest, wide, cut} = {8'd117, 8'd122, 8'he0};
            2'd1:    {smallest, wide, cut} = {8'd119, 8'd123, 8'h80};
            default: {smallest, wide, cut} = {8'd121, 8'd124, 8'h00};
        endcase
    end

    // The magnitude in units of 2^-15, truncated. Only exponents of 117 to 126 come here, so the
    // shift of 127 - exponent fits 4 bits: it is their complement.
    wire [15:0] magnitude = {1'b1, value[22:8]} >> ~exponent[3:0];
    wire        unused = magnitude[15];
    wire        too_much = settings[2] && (magnitude[7:0] & cut) != 8'd0;

    always_comb begin
        if (exponent >= 8'd127) tag = 2'd3;
        else if (exponent < smallest) tag = 2'd0;
        else if (exponent >= wide || too_much) tag = 2'd2;
        else tag = 2'd1;

        unique case (tag)
            2'd0: code = 32'd0;
            2'd1: code = {24'd0, sign, magnitude[14:8]};
            2'd2: code = {16'd0, sign, magnitude[14:0]};
            2'd3: code = value;
        endcase
    end
endmodule
